"""Sparse MLA decode: each token attends selected slots of one or two paged caches in one softmax.

Query norm and RoPE before attention, inverse RoPE and quantisation after it are options. They give what the separate
ops give, including the roundings between the steps.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ..preprocess.q_norm_rope import q_norm_rope
from .attend import attend, gather_keys, token_chunks
from .inv_rope import inv_rope, inv_rope_fp8_quant, quantize_groups


class DecodeArguments(NamedTuple):
    """Arguments of `sparse_mla_decode`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: window cache in `cache_format`, pages of `block_size` tokens.
        indices: int `[>= T, W]` physical slots; lens: int `[>= T]`, number of valid columns of each row.
        scale: factor of the scores. It does not apply to the sink.
        attn_sink: float32 `[H]` logits of a key with value zero; -inf has no effect, +inf gives out 0.
        extra_k_cache, extra_indices, extra_lens, extra_block_size: a second cache, `[>= T, K]` slots; all or none.
        kv_scale: float32, one element, scale of both `fp8` caches.
        positions: int `[>= T]`; cos_sin_cache: float32 `[max_pos, rope_dim]`. Both or none; the next two need them.
        q_norm_eps: attend `q_norm_rope(q, ..., q_norm_eps)`; q is then the output of wq_b, not e4m3.
        inverse_rope: return `inv_rope(out, ...)`, of `out` rounded to its dtype.
        batch_invariant: make the bits of a token's result depend on its own row alone, not on the number of tokens or
            on the widths W and K. The kernels and the form for CPUs guarantee it; this definition is as
            invariant as `torch.bmm`.
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    lens: Tensor
    block_size: int
    cache_format: str
    scale: float
    attn_sink: Tensor | None = None
    extra_k_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_lens: Tensor | None = None
    extra_block_size: int = 0
    kv_scale: Tensor | None = None
    positions: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    q_norm_eps: float | None = None
    inverse_rope: bool = False
    batch_invariant: bool = False


class DecodeQuantArguments(NamedTuple):
    """Arguments of `sparse_mla_decode_quant`, in schema order.

    Attributes:
        q to batch_invariant: as in `DecodeArguments`; positions and cos_sin_cache are needed unless `inverse_rope` is
            False, which quantises the heads without rotating them back.
        n_groups, heads_per_group, packed_scales: as in `inv_rope_fp8_quant`; 0 heads stand for H // n_groups.
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    lens: Tensor
    block_size: int
    cache_format: str
    scale: float
    attn_sink: Tensor | None = None
    extra_k_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_lens: Tensor | None = None
    extra_block_size: int = 0
    kv_scale: Tensor | None = None
    positions: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    q_norm_eps: float | None = None
    inverse_rope: bool = True
    batch_invariant: bool = False
    n_groups: int = 1
    heads_per_group: int = 0
    packed_scales: bool = False

    def decode(self) -> DecodeArguments:
        """Return the arguments of the attention that is quantised."""
        fields: tuple[Any, ...] = self
        return DecodeArguments(*fields[: len(DecodeArguments._fields)])

    def group_heads(self) -> int:
        """Return the heads of a group of the output projection; by default an equal share of all heads."""
        return self.heads_per_group or self.q.shape[1] // max(1, self.n_groups)


class RaggedDecodeArguments(NamedTuple):
    """Arguments of `sparse_mla_decode_ragged`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: cache in `cache_format`, pages of `block_size` tokens. A gathered workspace `[S, D]` is a `plain` cache
            of pages of one token, `kv[:, None]`.
        indices: int `[N]` physical slots; indptr: int `[> T]`. Token t attends
            `indices[indptr[t] : indptr[t + 1]]`. Entries after the last token's end are never read, so N may be a
            capacity.
        scale, attn_sink, kv_scale: as in `DecodeArguments`.
        extra_k_cache, extra_indices, extra_indptr, extra_block_size: a second cache and its list; all or none.
        max_entries, extra_max_entries: largest number of entries of a row; the rest of a longer row is ignored. 0
            stands for N, the slowest choice.
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    indptr: Tensor
    block_size: int
    cache_format: str
    scale: float
    attn_sink: Tensor | None = None
    extra_k_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_indptr: Tensor | None = None
    extra_block_size: int = 0
    kv_scale: Tensor | None = None
    max_entries: int = 0
    extra_max_entries: int = 0

    def decode(
        self, rows: Tensor, lens: Tensor, extra_rows: Tensor | None, extra_lens: Tensor | None
    ) -> DecodeArguments:
        """Return the arguments of `sparse_mla_decode` for these padded rows."""
        dense = self._replace(indices=rows, indptr=lens, extra_indices=extra_rows, extra_indptr=extra_lens)
        return DecodeArguments(*dense[:-2])


class LatentDecodeArguments(NamedTuple):
    """Arguments of `sparse_mla_decode_latent`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16 or float32.
        k_cache: rows `[P, S, D]` in one of those dtypes, S = `block_size`.
        indices: int `[>= T, K]` physical slots; lens: int `[>= T]`, number of valid columns of each row.
        scale: factor of the scores.
        value_dim: V, at most D.
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    lens: Tensor
    block_size: int
    scale: float
    value_dim: int


DecodeOutArguments: type[Any] = collections.namedtuple(  # type: ignore[misc]
    "DecodeOutArguments", ("out", "lse", *DecodeArguments._fields), defaults=[*DecodeArguments._field_defaults.values()]
)
"""Arguments of `sparse_mla_decode_out`: the outputs, followed by `DecodeArguments`."""
DecodeOutArguments.__annotations__ = {"out": Tensor, "lse": Tensor, **DecodeArguments.__annotations__}


Decode = Callable[[DecodeArguments], tuple[Tensor, Tensor]]
"""Attention of a variant: `sparse_mla_decode`, or its form for a device."""


def output_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of attention's output: that of the queries, or bfloat16 for quantised ones."""
    return torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype


def sparse_mla_decode(call: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Attend the selected slots of a window cache and, if given, of a compressed cache. attend.py has the formula.

    Every token is a separate row, in decode and prefill alike: there is no mask, causality is in the indices.

    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        An index that is negative or past the cache, and a column at or past its length, is ignored; it need not be
        at the end of the row. A slot that is listed twice counts twice. A row with nothing to attend gives out 0 and
        lse +inf. Keys are dequantised to bfloat16; everything else is float32 and rounded once, into `out`. Tokens do
        not influence each other. Keys are gathered for a bounded number of tokens at a time.
    """
    q, positions, table = call.q, call.positions, call.cos_sin_cache
    if call.q_norm_eps is not None and positions is not None and table is not None:
        q = q_norm_rope(q, positions, table, call.q_norm_eps)
    tokens, heads, head_dim = q.shape
    caches = [(call.k_cache, call.block_size, call.indices, call.lens)]
    if call.extra_k_cache is not None and call.extra_indices is not None and call.extra_lens is not None:
        caches.append((call.extra_k_cache, call.extra_block_size, call.extra_indices, call.extra_lens))
    out = q.new_empty(q.shape, dtype=output_dtype(q))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    for rows in token_chunks(tokens, sum(entry[2].shape[1] for entry in caches), head_dim, q.device):
        parts = [
            gather_keys(cache, call.cache_format, block, slots[rows], count[rows], call.kv_scale)
            for cache, block, slots, count in caches
        ]
        keys, valid = (
            parts[0] if len(parts) == 1 else (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        )
        out[rows], _, lse[rows] = attend(q[rows], keys, valid, call.scale, call.attn_sink)
    if call.inverse_rope and positions is not None and table is not None:
        out = inv_rope(out, positions, table)
    return out, lse


def sparse_mla_decode_out(call: Any, decode: Decode = sparse_mla_decode) -> None:
    """Write `sparse_mla_decode` into `out` `[T, H, D]` of its dtype and `lse` float32 `[T, H]`, of any strides.

    They share no memory with each other or with the other arguments. `call` is a `DecodeOutArguments`.
    """
    out, lse, *arguments = call
    attended = decode(DecodeArguments(*arguments))
    out.copy_(attended[0])
    lse.copy_(attended[1])


def sparse_mla_decode_quant(call: DecodeQuantArguments, decode: Decode = sparse_mla_decode) -> tuple[Tensor, Tensor]:
    """Attend as `sparse_mla_decode`, then quantise the output to e4m3 with 1x128 UE8M0 scales.

    Returns:
        `inv_rope_fp8_quant(out, ...)` of `out` rounded to its dtype: e4m3 `[T, G, K]` and scales, strides included.
    """
    out, _ = decode(call.decode()._replace(inverse_rope=False))
    heads, positions, table = call.group_heads(), call.positions, call.cos_sin_cache
    if call.inverse_rope and positions is not None and table is not None:
        return inv_rope_fp8_quant(out, positions, table, call.n_groups, heads, call.packed_scales)
    return quantize_groups(out[:, : call.n_groups * heads], call.n_groups, call.packed_scales)


def sparse_mla_decode_latent(call: LatentDecodeArguments, decode: Decode = sparse_mla_decode) -> tuple[Tensor, Tensor]:
    """Attend the selected rows of a cache; all dims give the scores, the first `value_dim` give the output.

    These are the rows of DeepSeek-V3.2: a latent and its rotated key.

    Returns:
        out: `[T, H, V]` in q's dtype, contiguous.
        lse: float32 `[T, H]`, natural logarithm, +inf where nothing is attended.
    Notes:
        Equals the first V dims of `sparse_mla_decode` of one plain cache, because the dims of an output are independent
        sums. Invalid slots, columns past a length, duplicates and empty rows count as there.
    """
    out, lse = decode(DecodeArguments(*call[:5], "plain", call.scale))
    return out[..., : call.value_dim].clone(memory_format=torch.contiguous_format), lse


def sparse_mla_decode_ragged(call: RaggedDecodeArguments, decode: Decode = sparse_mla_decode) -> tuple[Tensor, Tensor]:
    """Attend as `sparse_mla_decode` for index rows that follow each other in one list (CSR), without padding.

    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        Bit for bit `sparse_mla_decode` of rows that hold the same entries in the same order, padded to the same widths.
        A slot out of range, and a part of a row that lies outside [0, N), is ignored; an end before its begin is an
        empty row. A row with nothing to attend gives out 0 and lse +inf.
    """
    tokens = call.q.shape[0]
    rows = dense_rows(call.indices, call.indptr, tokens, call.max_entries)
    extra: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if call.extra_indices is not None and call.extra_indptr is not None:
        extra = dense_rows(call.extra_indices, call.extra_indptr, tokens, call.extra_max_entries)
    return decode(call.decode(*rows, *extra))


def dense_rows(indices: Tensor, indptr: Tensor, tokens: int, max_entries: int) -> tuple[Tensor, Tensor]:
    """Return the first `tokens` rows of a list as `[T, max_entries]` with a -1 tail, and their lengths `[T]`."""
    capacity = indices.shape[0]
    width = max_entries or capacity
    begin, end = indptr[:tokens].long(), indptr[1 : tokens + 1].long()
    position = begin[:, None] + torch.arange(width, device=indices.device)
    inside = (position >= 0) & (position < capacity) & (position < end[:, None])
    if capacity == 0:
        return indices.new_full((tokens, width), PAD_INDEX), (end - begin).clamp(0, width).to(indptr.dtype)
    rows = torch.where(inside, indices[torch.where(inside, position, 0)], PAD_INDEX)
    return rows, (end - begin).clamp(0, width).to(indptr.dtype)
