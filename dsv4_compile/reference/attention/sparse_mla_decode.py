"""Sparse attention of every token over slots of one or two paged caches, joined in one softmax.

Norm and RoPE of the queries in front and the inverse RoPE, with or without quantisation, behind are options. They are
defined by the ops that do the same alone, roundings between the steps included.

Sparse attention over rows of which only the leading dims are values: DeepSeek-V3.2's latent and its rotated key.

Sparse attention of every token over slots of one or two paged caches, listed one after the other (CSR).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ..preprocess.q_norm_rope import q_norm_rope
from .attend import attend, gather_keys, token_chunks
from .inv_rope import inv_rope, inv_rope_fp8_quant, quantize_groups


def output_dtype(q: Tensor) -> torch.dtype:
    """Attention returns the dtype of its queries, and bfloat16 for quantised ones."""
    return torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype


def group_heads(heads: int, n_groups: int, heads_per_group: int) -> int:
    """Heads of a group of the output projection; 0 stands for an equal share of all `heads`."""
    return heads_per_group or heads // max(1, n_groups)


def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend the selected slots of a window cache and, if given, of a compressed cache. See attend.py for the formula.

    Every token is a row of its own, in decode and prefill alike: there is no mask, causality is in the indices.

    Args:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: window cache in `cache_format`, pages of `block_size` tokens.
        indices: int `[>= T, W]` physical slots; lens: int `[>= T]`, how many columns of a row count.
        scale: factor of the scores. It does not apply to the sink.
        attn_sink: float32 `[H]` logits of a key with value zero; -inf has no effect, +inf gives out 0.
        extra_k_cache, extra_indices, extra_lens, extra_block_size: a second cache, `[>= T, K]` slots; all or none.
        kv_scale: float32, one element, scale of both `fp8` caches.
        positions: int `[>= T]`; cos_sin_cache: float32 `[max_pos, rope_dim]`. Both or none; the next two need them.
        q_norm_eps: q is what wq_b gives, not e4m3; what is attended is `q_norm_rope(q, ..., q_norm_eps)`.
        inverse_rope: return `inv_rope(out, ...)`, of `out` rounded to its dtype.
        batch_invariant: the bits of a token's result depend on its own row alone, not on how many tokens there are or
            on the widths W and K. The kernels see to it; this definition is as invariant as `torch.bmm`.
    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        An index that is negative or past the cache, and a column at or past its length, is ignored; it need not be
        at the end of the row. A slot that is listed twice counts twice. A row with nothing to attend gives out 0 and
        lse +inf. Keys are dequantised to bfloat16; everything else is float32 and rounded once, into `out`. Tokens do
        not influence each other. Keys are gathered for a bounded number of tokens at a time.
    """
    if q_norm_eps is not None and positions is not None and cos_sin_cache is not None:
        q = q_norm_rope(q, positions, cos_sin_cache, q_norm_eps)
    tokens, heads, head_dim = q.shape
    caches = [(k_cache, block_size, indices, lens)]
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        caches.append((extra_k_cache, extra_block_size, extra_indices, extra_lens))
    out = q.new_empty(q.shape, dtype=output_dtype(q))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    for rows in token_chunks(tokens, sum(entry[2].shape[1] for entry in caches), head_dim, q.device):
        parts = [
            gather_keys(cache, cache_format, block, slots[rows], count[rows], kv_scale)
            for cache, block, slots, count in caches
        ]
        keys, valid = parts[0] if len(parts) == 1 else (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        out[rows], _, lse[rows] = attend(q[rows], keys, valid, scale, attn_sink)
    if inverse_rope and positions is not None and cos_sin_cache is not None:
        out = inv_rope(out, positions, cos_sin_cache)
    return out, lse


def sparse_mla_decode_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> None:
    """`sparse_mla_decode` into `out` `[T, H, D]` of its dtype and `lse` float32 `[T, H]`, of any strides.

    They share no memory with each other or with an argument.
    """
    made = sparse_mla_decode(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )
    out.copy_(made[0])
    lse.copy_(made[1])


def sparse_mla_decode_quant(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla_decode`, then e4m3 with 1x128 UE8M0 scales of its output, as the output projection wants it.

    Args:
        q to batch_invariant: as `sparse_mla_decode`; positions and cos_sin_cache are needed unless `inverse_rope` is
            False, which quantises the heads as attention leaves them.
        n_groups, heads_per_group, packed_scales: as `inv_rope_fp8_quant`; 0 heads stand for H // n_groups.
    Returns:
        `inv_rope_fp8_quant(out, ...)` of `out` rounded to its dtype: e4m3 `[T, G, K]` and scales, strides included.
    """
    out, _ = sparse_mla_decode(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        False,
        batch_invariant,
    )
    size = group_heads(q.shape[1], n_groups, heads_per_group)
    if inverse_rope and positions is not None and cos_sin_cache is not None:
        return inv_rope_fp8_quant(out, positions, cos_sin_cache, n_groups, size, packed_scales)
    return quantize_groups(out[:, : n_groups * size], n_groups, packed_scales)


def sparse_mla_decode_latent(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend the selected rows of a cache; all dims make the scores, the first `value_dim` make the output.

    Args:
        q: `[T, H, D]` bfloat16, float16 or float32.
        k_cache: rows `[P, S, D]` in one of those dtypes, S = `block_size`.
        indices: int `[>= T, K]` physical slots; lens: int `[>= T]`, how many columns of a row count.
        scale: factor of the scores.
        value_dim: V, at most D.
    Returns:
        out: `[T, H, V]` in q's dtype, contiguous.
        lse: float32 `[T, H]`, natural logarithm, +inf where nothing is attended.
    Notes:
        `sparse_mla_decode` of one plain cache, of whose output the first V dims are kept: every dim of an output is a
        sum of its own. Invalid slots, columns past a length, duplicates and empty rows as there.
    """
    out, lse = sparse_mla_decode(q, k_cache, indices, lens, block_size, "plain", scale)
    return out[..., :value_dim].clone(memory_format=torch.contiguous_format), lse


def sparse_mla_decode_ragged(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> tuple[Tensor, Tensor]:
    """What `sparse_mla_decode` computes, for index rows without padding between them.

    Args:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: cache in `cache_format`, pages of `block_size` tokens. A gathered workspace `[S, D]` is a `plain` cache
            of pages of one token, `kv[:, None]`.
        indices: int `[N]` physical slots; indptr: int `[> T]`. Token t attends
            `indices[indptr[t] : indptr[t + 1]]`. What lies behind the last token's end is never read, so N may be a
            capacity.
        scale, attn_sink, kv_scale: as `sparse_mla_decode`.
        extra_k_cache, extra_indices, extra_indptr, extra_block_size: a second cache and its list; all or none.
        max_entries, extra_max_entries: most entries a row has; the rest of a longer row is ignored. 0 = N. The
            definition is as slow as this bound is loose.
    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        Bit for bit `sparse_mla_decode` of rows that hold the same entries in the same order, padded to the same widths.
        A slot out of range, and a part of a row that lies outside [0, N), is ignored; an end in front of its begin is
        an empty row. A row with nothing to attend gives out 0 and lse +inf.
    """
    tokens = q.shape[0]
    rows, lens = dense_rows(indices, indptr, tokens, max_entries)
    extra_rows = extra_lens = None
    if extra_indices is not None and extra_indptr is not None:
        extra_rows, extra_lens = dense_rows(extra_indices, extra_indptr, tokens, extra_max_entries)
    return sparse_mla_decode(
        q,
        k_cache,
        rows,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_rows,
        extra_lens,
        extra_block_size,
        kv_scale,
    )


def dense_rows(indices: Tensor, indptr: Tensor, tokens: int, max_entries: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` rows of a list as `[T, max_entries]` with a -1 tail, and their lengths `[T]`."""
    capacity = indices.shape[0]
    width = max_entries or capacity
    begin, end = indptr[:tokens].long(), indptr[1 : tokens + 1].long()
    place = begin[:, None] + torch.arange(width, device=indices.device)
    inside = (place >= 0) & (place < capacity) & (place < end[:, None])
    if capacity == 0:
        return indices.new_full((tokens, width), PAD_INDEX), (end - begin).clamp(0, width).to(indptr.dtype)
    rows = torch.where(inside, indices[torch.where(inside, place, 0)], PAD_INDEX)
    return rows, (end - begin).clamp(0, width).to(indptr.dtype)
