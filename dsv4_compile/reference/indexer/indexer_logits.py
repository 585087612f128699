"""Logits of the indexer's compressed entries, and the exact selection of the best.

    logit[t, j] = sum_h weights[t, h] * relu(q[t, h] . k[j])

in float32, with q and k dequantised. Entry j is visible to token t if j < context_lens[t] and the block that holds it
is in the block table and in the cache.

Among visible entries a larger logit wins, equal logits (0.0 and -0.0 are equal) go to the smaller index, and NaN loses
to every number, -inf included. Up to K visible entries are all taken, whatever their logits. The selected indices are
listed in ascending order: attention does not depend on the order, an ascending walk reads the cache forward, and equal
selections are equal rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_SLOT
from ..common import paging
from ..common.kv_format import dequantize_indexer, load_indexer

TOKENS_AT_A_TIME = 64
ENTRIES_AT_A_TIME = 2048
"""Tiles of the score. With 64 heads of 128 dims one takes 32 MiB of dot products and, paged, 64 MiB of keys; selection
adds about 40 bytes for each of 64 tokens and each entry of the longest context."""

MAX_LOGITS_BYTES = 2**29
"""Default bound on the bytes of logits that `indexer_logits_topk_ragged` holds at once."""
_LOGIT_BYTES = 4
_INT32_MIN = -(2**31)


class LogitsArguments(NamedTuple):
    """Arguments of `indexer_logits`, in schema order.

    Attributes:
        q to cache_format: as in `TopkArguments`.
        max_context: columns of the result.
    """

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    k_cache: Tensor
    block_table: Tensor
    token_to_req: Tensor
    context_lens: Tensor
    block_size: int
    cache_format: str
    max_context: int


class TopkArguments(NamedTuple):
    """Arguments of `indexer_logits_topk`, in schema order.

    Attributes:
        q, q_scale, weights: `[T, H, .]`, `[T, H, .]` and float32 `[T, H]`, as `indexer_q_rope_quant` returns them.
        k_cache: indexer cache of `cache_format`; block_table: int32 `[R, B]`, in blocks of `block_size` entries.
        token_to_req, context_lens: int `[>= T]`, a token's request and how many entries it sees. A request out of range
            or a length below 1 sees none; a length beyond the block table sees what the table reaches.
        topk: K, at least 1.
    """

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    k_cache: Tensor
    block_table: Tensor
    token_to_req: Tensor
    context_lens: Tensor
    block_size: int
    cache_format: str
    topk: int


class RaggedTopkArguments(NamedTuple):
    """Arguments of `indexer_logits_topk_ragged`, in schema order.

    Attributes:
        q, q_scale, weights: as in `TopkArguments`.
        k, k_scale: `[N, .]`, as `cp_gather_indexer_k` writes them.
        row_starts, row_ends: int `[>= T]`. Token t sees the rows [row_starts[t], row_ends[t]) that `k` has; none with
            a negative start.
        topk: K, at least 1.
        max_logits_bytes: bound on the float32 logits, N for each token, that are held at once; one token at least is
            scored at a time. It changes no result.
    """

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    k: Tensor
    k_scale: Tensor
    row_starts: Tensor
    row_ends: Tensor
    cache_format: str
    topk: int
    max_logits_bytes: int = MAX_LOGITS_BYTES


PagedArguments = LogitsArguments | TopkArguments


def indexer_logits(op: LogitsArguments) -> Tensor:
    """Return float32 `[T, max_context]`, contiguous: the logit of each entry, -inf where it is not visible."""
    logits = op.weights.new_empty(op.q.shape[0], op.max_context)
    for rows in _tiles(op.q.shape[0]):
        values, visible = _score_pages(op, rows, op.max_context)
        logits[rows] = torch.where(visible, values, -torch.inf)
    return logits


def indexer_logits_topk(op: TopkArguments) -> Tensor:
    """Select the `topk` visible entries of largest logit.

    Returns:
        int32 `[T, topk]`, contiguous: indices within the request, ascending, then -1. The module says which.
    """
    selected = op.q.new_empty(op.q.shape[0], op.topk, dtype=torch.int32)
    for rows in _tiles(op.q.shape[0]):
        values, visible = _score_pages(op, rows, op.block_table.shape[1] * op.block_size)
        selected[rows] = select_topk(values, visible, op.topk)
    return selected


def indexer_logits_topk_ragged(op: RaggedTopkArguments) -> Tensor:
    """Select as `indexer_logits_topk` from gathered keys, one request after the other.

    Returns:
        int32 `[T, topk]`, contiguous: row - row_starts[t], ascending, then -1.
    """
    selected = op.q.new_empty(op.q.shape[0], op.topk, dtype=torch.int32)
    for rows in _tiles(op.q.shape[0], tokens_that_fit(op.k.shape[0], op.max_logits_bytes)):
        values, visible = score_rows(op, rows)
        entries = select_topk(values, visible, op.topk)
        selected[rows] = torch.where(entries >= 0, entries - op.row_starts[rows, None], PAD_INDEX).int()
    return selected


def select_topk(logits: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Select int32 `[N, topk]` columns of `logits` and `visible` `[N, J]` by the rule of this module."""
    width = logits.shape[1]
    best = _selection_keys(logits, visible).topk(min(topk, width), dim=1, sorted=False).indices
    # An invisible column that filled the row is sorted after the last column, and becomes padding.
    best = torch.where(visible.gather(1, best), best, width).sort(dim=1).values
    best = torch.where(best < width, best, PAD_INDEX).int()
    return torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=PAD_INDEX)


def _selection_keys(logits: Tensor, visible: Tensor) -> Tensor:
    """Return int64 `[N, J]`, distinct in a row, larger for entries that are selected first. They make any top-k
    exact."""
    bits = (logits + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    order = torch.where(logits.isnan(), _INT32_MIN + 1, order)
    order = torch.where(visible, order, _INT32_MIN)
    column = torch.arange(logits.shape[1], device=logits.device)
    return (order.long() << 32) | (0xFFFFFFFF - column)


def _score_pages(op: PagedArguments, rows: slice, width: int) -> tuple[Tensor, Tensor]:
    """Return logits float32 `[n, width]`, arbitrary where not visible, and visibility bool `[n, width]`."""
    values, visible = [], []
    q, requests, lens = dequantize_queries(op, rows), op.token_to_req[rows, None], op.context_lens[rows, None]
    for entry in torch.arange(width, device=q.device).split(ENTRIES_AT_A_TIME):
        slots = paging.lookup_slots(op.block_table, requests, entry, op.block_size)
        seen = paging.valid_slots(slots, op.k_cache.shape[0], op.block_size) & (entry < lens)
        keys = load_indexer(op.k_cache, op.cache_format, op.block_size, torch.where(seen, slots, PAD_SLOT))
        values.append(_head_sum(q, op.weights[rows], keys))
        visible.append(seen)
    return torch.cat(values, dim=1), torch.cat(visible, dim=1)


def score_rows(op: RaggedTopkArguments, rows: slice) -> tuple[Tensor, Tensor]:
    """Return logits float32 and visibility bool, `[n, N]`, of the tokens `rows` for gathered keys."""
    values, q = [], dequantize_queries(op, rows)
    for entries, scale in zip(op.k.split(ENTRIES_AT_A_TIME), op.k_scale.split(ENTRIES_AT_A_TIME), strict=True):
        if op.cache_format == "plain":
            keys = entries.float()
        else:
            # A view as float32 needs aligned rows, which a slice of a wider buffer need not have.
            keys = dequantize_indexer(entries, scale.clone(memory_format=torch.contiguous_format), op.cache_format)
        values.append(_head_sum(q, op.weights[rows], keys))
    entry = torch.arange(op.k.shape[0], device=op.k.device)
    starts, ends = op.row_starts[rows, None], op.row_ends[rows, None]
    return torch.cat(values, dim=1), (starts >= 0) & (entry >= starts) & (entry < ends)


def _head_sum(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return float32 `[n, J]` from queries `[n, H, D]`, weights `[n, H]` and keys `[n, J, D]` or `[J, D]`."""
    dots = torch.matmul(q, keys.transpose(-1, -2)).relu()
    return torch.matmul(weights[:, None], dots)[:, 0]


def dequantize_queries(op: PagedArguments | RaggedTopkArguments, rows: slice) -> Tensor:
    """Return float32 `[n, H, D]`. The scale of an fp8 query is already in its weights."""
    q = op.q[rows]
    return dequantize_indexer(q, op.q_scale[rows], op.cache_format) if op.cache_format == "indexer_mxfp4" else q.float()


def tokens_that_fit(width: int, max_logits_bytes: int) -> int:
    """Return how many tokens' logits, `width` each, fit in `max_logits_bytes`: at least one token."""
    return max(1, max_logits_bytes // (_LOGIT_BYTES * max(width, 1)))


def _tiles(tokens: int, limit: int = TOKENS_AT_A_TIME) -> list[slice]:
    """Return slices that cover `tokens` rows and never reach beyond them: per-token arguments may be longer."""
    step = min(limit, TOKENS_AT_A_TIME)
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]
