"""Sparse MLA decode over the keys that are there: rows of slots are cut at the longest, and no empty slot is read.

A kernel takes float32 caches of whole rows. With others few tokens gather their keys, and many that attend the same
ones, as those of a prompt, share them: a tile of tokens multiplies with the union of its keys, and the count of each
key for each token stands for the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.attention.attend import token_chunks
from ...reference.attention.sparse_mla_decode import DecodeArguments, output_dtype
from ...reference.common import paging
from ...reference.preprocess.q_norm_rope import q_norm_rope
from .. import native
from ..common.invariant import before_sums_by_torch
from ..common.rows import read_rows
from .inv_rope import inv_rope

ROWS_OF_A_TILE = 1024
"""Rows, a token and a head each, that multiply with shared keys at once."""
FEWEST_TOKENS = 16
"""Fewest tokens that share keys."""
MOST_SHARED = 4
"""Most keys of the union of a tile, per key that a token may attend, to share them."""


class _Selection(NamedTuple):
    """Slots int `[T, N]` of one cache, cut at the longest row, and which of them are attended."""

    cache: Tensor
    block_size: int
    slots: Tensor
    valid: Tensor

    def tokens(self, rows: slice) -> _Selection:
        """Return the selection of some tokens."""
        return self._replace(slots=self.slots[rows], valid=self.valid[rows])


def sparse_mla_decode(call: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does, up to the order of sums."""
    q, positions, table = call.q, call.positions, call.cos_sin_cache
    if call.q_norm_eps is not None and positions is not None and table is not None:
        q = q_norm_rope(q, positions, table, call.q_norm_eps)
    tokens, heads, _ = q.shape
    if _takes(call, q):
        out, lse = _in_kernel(call, q)
        return _rotated_back(call, out), lse
    before_sums_by_torch()
    if call.batch_invariant and tokens > 1:
        # The order of sums in a GEMM may depend on the number of tokens, so each token gets separate GEMMs.
        alone = [sparse_mla_decode(_token(call, t)) for t in range(tokens)]
        return torch.cat([out for out, _ in alone]), torch.cat([lse for _, lse in alone])
    selections = [_select(call.k_cache, call.block_size, call.indices[:tokens], call.lens[:tokens])]
    if call.extra_k_cache is not None and call.extra_indices is not None and call.extra_lens is not None:
        extra = call.extra_indices[:tokens], call.extra_lens[:tokens]
        selections.append(_select(call.extra_k_cache, call.extra_block_size, *extra))
    selections = [selection for selection in selections if selection.slots.numel() > 0]
    parts: list[tuple[Tensor, Tensor]] = []
    if selections:
        shares = tokens >= FEWEST_TOKENS
        step = max(FEWEST_TOKENS, ROWS_OF_A_TILE // heads) if shares else tokens
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            in_rows = [selection.tokens(rows) for selection in selections]
            shared = _attend_shared(call, q[rows], in_rows) if shares else None
            parts += _attend_gathered(call, q[rows], in_rows) if shared is None else [shared]
    else:
        lse = q.new_full((tokens, heads), torch.inf, dtype=torch.float32)
        parts.append((q.new_zeros(q.shape, dtype=torch.float32), lse))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return _rotated_back(call, out.to(output_dtype(q))), lse


def _token(call: DecodeArguments, t: int) -> DecodeArguments:
    """Return the call of token `t` alone."""
    rows = "q", "indices", "lens", "extra_indices", "extra_lens", "positions"
    tensors = {name: getattr(call, name) for name in rows}
    return call._replace(**{name: tensor[t : t + 1] for name, tensor in tensors.items() if tensor is not None})


def _rotated_back(call: DecodeArguments, out: Tensor) -> Tensor:
    if call.inverse_rope and call.positions is not None and call.cos_sin_cache is not None:
        return inv_rope(out, call.positions, call.cos_sin_cache)
    return out


def _takes(call: DecodeArguments, q: Tensor) -> bool:
    """Return whether a kernel takes the call."""
    rows = call.indices, call.extra_indices
    lens = call.lens, call.extra_lens
    flat = all(row is None or (row.stride(1) == 1 and row.dtype is torch.int32) for row in rows)
    floats = q, call.k_cache, call.extra_k_cache, call.attn_sink
    return call.cache_format == "plain" and flat and native.takes(*floats, int32=lens)


def _in_kernel(call: DecodeArguments, q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention in a kernel, a head of a token at a time, over the keys where they are."""
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    blocks = call.block_size, call.extra_block_size
    caches, rows = (call.k_cache, call.extra_k_cache), (call.indices, call.extra_indices)
    capacity = [0 if c is None else c.shape[0] * block for c, block in zip(caches, blocks, strict=True)]
    width = [0 if row is None else row.shape[1] for row in rows]
    stride = [0 if row is None else row.stride(0) for row in rows]
    where = *caches, *rows, call.lens, call.extra_lens, *capacity, *width, *stride
    settings = float(call.scale), torch.get_num_threads()
    native.call("attend", q, *where, call.attn_sink, out, lse, *q.shape, *settings)
    return out, lse


def _select(cache: Tensor, block_size: int, indices: Tensor, lens: Tensor) -> _Selection:
    """Return the slots of one cache up to the longest row."""
    longest = int(lens.max()) if lens.shape[0] > 0 and cache.shape[0] > 0 else 0
    slots = indices[:, : max(longest, 0)]
    valid = paging.valid_slots(slots, cache.shape[0], block_size) & (torch.arange(slots.shape[1]) < lens[:, None])
    return _Selection(cache, block_size, slots, valid)


def _attend_gathered(call: DecodeArguments, q: Tensor, parts: Sequence[_Selection]) -> list[tuple[Tensor, Tensor]]:
    """Return out `[n, H, D]` and lse `[n, H]`, float32, of a few tokens at a time, after gathering their keys."""
    width = sum(selection.slots.shape[1] for selection in parts)
    results = []
    for rows in token_chunks(q.shape[0], width, q.shape[2], q.device):
        queries = q[rows].float()
        in_rows = [selection.tokens(rows) for selection in parts]
        keys = [_gather(call, selection) for selection in in_rows]
        scores = torch.cat([torch.bmm(queries, key.transpose(1, 2)) for key in keys], dim=2).mul_(call.scale)
        valid = torch.cat([selection.valid for selection in in_rows], dim=1)
        weights, norm, lse = _softmax(scores, valid, call.attn_sink)
        widths = [selection.slots.shape[1] for selection in in_rows]
        sums = [torch.bmm(weight, key) for weight, key in zip(weights.split(widths, dim=2), keys, strict=True)]
        out = sums[0] if len(sums) == 1 else sums[0].add_(sums[1])
        results.append((out.mul_(norm[..., None]), lse))
    return results


def _gather(call: DecodeArguments, part: _Selection) -> Tensor:
    """Return the keys `[n, N, D]` of each token, zero where it has none."""
    missing = (~part.valid).view(-1).nonzero().view(-1)
    slots = part.slots.masked_fill(~part.valid, 0) if missing.shape[0] > 0 else part.slots
    keys = read_rows(part.cache, call.cache_format, part.block_size, slots.reshape(-1), call.kv_scale)
    return keys.index_fill_(0, missing, 0.0).view(*slots.shape, -1)


def _attend_shared(call: DecodeArguments, q: Tensor, parts: Sequence[_Selection]) -> tuple[Tensor, Tensor] | None:
    """Return out `[n, H, D]` and lse `[n, H]`, float32, of a tile; None if its tokens share too few keys to gain.

    A key that is not finite would reach tokens that do not attend it, as zero times infinity: None for those too.
    """
    tokens, heads, head_dim = q.shape
    unions = [_union(selection) for selection in parts]
    if sum(union.shape[0] for union, _ in unions) > MOST_SHARED * sum(selection.slots.shape[1] for selection in parts):
        return None
    keys = torch.cat(
        [
            read_rows(selection.cache, call.cache_format, selection.block_size, union, call.kv_scale)
            for selection, (union, _) in zip(parts, unions, strict=True)
        ]
    )
    if not bool(keys.sum().isfinite()):
        return None
    if keys.shape[0] == 0:
        return torch.zeros(q.shape), torch.full((tokens, heads), torch.inf)
    counts = torch.cat([count for _, count in unions], dim=1)
    scores = torch.mm(q.reshape(tokens * heads, head_dim).float(), keys.t()).mul_(call.scale)
    weights, norm, lse = _softmax(scores.view(tokens, heads, -1), counts > 0, call.attn_sink, counts)
    out = torch.mm(weights.view(tokens * heads, -1), keys).view(q.shape)
    return out.mul_(norm[..., None]), lse


def _union(part: _Selection) -> tuple[Tensor, Tensor]:
    """Return the slots int64 `[U]` that some token attends, and float32 `[n, U]`, how often each token does."""
    size = part.cache.shape[0] * part.block_size
    slots = part.slots.masked_fill(~part.valid, size).long()
    used = torch.zeros(size + 1, dtype=torch.bool).index_fill_(0, slots.reshape(-1), True)
    used[size] = True  # what nobody attends has the last column
    union = used.nonzero().view(-1)
    columns = (used.cumsum(0) - 1).index_select(0, slots.reshape(-1)).view(slots.shape)
    counts = torch.zeros(slots.shape[0], union.shape[0]).scatter_add_(1, columns, torch.ones(columns.shape))
    return union[:-1], counts[:, :-1]


def _softmax(
    scores: Tensor, valid: Tensor, sink: Tensor | None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights `[n, H, N]`, in place of `scores`, what divides their sum, and lse, both `[n, H]`.

    `counts` `[n, N]` says how often a key counts, once if it is None.
    """
    if not bool(valid.all()):
        scores.masked_fill_(~valid[:, None], -torch.inf)
    top = scores.amax(-1)
    # -inf - -inf is NaN: a row without keys is shifted by zero instead.
    weights = scores.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
    if counts is not None and bool((counts > 1).any()):
        weights = weights.mul_(counts[:, None])
    total = weights.sum(-1)
    empty = total == 0
    lse = (top + total.log()).masked_fill_(empty, torch.inf)
    norm = total.reciprocal() if sink is None else (1.0 / (1.0 + (sink - lse).exp())) / total
    return weights, norm.masked_fill_(empty, 0.0), lse
