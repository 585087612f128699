"""Score every visible compressed entry of a token's request, and pick the best.

    logit[t, j] = sum_h weights[t, h] * relu(q[t, h] . k[j])

in float32, with q and k dequantised. Entry j is visible to token t if j < context_lens[t] and the block that holds it
is in the block table and in the cache.

Selection is exact. Among visible entries a larger logit wins, equal logits (0.0 and -0.0 are equal) go to the smaller
index, and NaN loses to every number, -inf included. When there are no more than K visible entries all are taken,
whatever their logits. The selected indices are listed in ascending order: attention does not depend on the order, an
ascending walk reads the cache forward, and equal selections are equal rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_SLOT
from ..common import paging
from ..common.kv_format import dequantize_indexer, load_indexer

TOKENS_AT_A_TIME = 64
ENTRIES_AT_A_TIME = 2048
"""Tiles of the score. With 64 heads of 128 dims one takes 32 MiB of products and, paged, 64 MiB of keys; selection
adds about 40 bytes for each of 64 tokens and each entry of the longest context."""

MAX_LOGITS_BYTES = 2**29
"""Most bytes of logits that `indexer_logits_topk_ragged` holds at once, unless it is told otherwise."""
_LOGIT_BYTES = 4
_INT32_MIN = -(2**31)


def indexer_logits(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    max_context: int,
) -> Tensor:
    """float32 `[T, max_context]`, contiguous: the logit of each entry, -inf where it is not visible.

    Arguments as for `indexer_logits_topk`.
    """
    logits = weights.new_empty(q.shape[0], max_context)
    for rows in _tiles(q.shape[0]):
        values, visible = _score_pages(
            _dequantize_queries(q[rows], q_scale[rows], cache_format),
            weights[rows],
            k_cache,
            block_table,
            token_to_req[rows],
            context_lens[rows],
            block_size,
            cache_format,
            max_context,
        )
        logits[rows] = torch.where(visible, values, -torch.inf)
    return logits


def indexer_logits_topk(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
) -> Tensor:
    """The `topk` visible entries of largest logit.

    Args:
        q, q_scale, weights: `[T, H, .]`, `[T, H, .]` and float32 `[T, H]`, as `indexer_q_rope_quant` returns them.
        k_cache: indexer cache of `cache_format`; block_table: int32 `[R, B]`, in blocks of `block_size` entries.
        token_to_req, context_lens: int `[>= T]`, a token's request and how many entries it sees. A request out of range
            or a length below 1 sees none; a length beyond the block table sees what the table reaches.
    Returns:
        int32 `[T, topk]`, contiguous: indices within the request, ascending, then -1. The module says which.
    """
    selected = q.new_empty(q.shape[0], topk, dtype=torch.int32)
    for rows in _tiles(q.shape[0]):
        values, visible = _score_pages(
            _dequantize_queries(q[rows], q_scale[rows], cache_format),
            weights[rows],
            k_cache,
            block_table,
            token_to_req[rows],
            context_lens[rows],
            block_size,
            cache_format,
            block_table.shape[1] * block_size,
        )
        selected[rows] = select_topk(values, visible, topk)
    return selected


def indexer_logits_topk_ragged(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> Tensor:
    """`indexer_logits_topk` over keys that `cp_gather_indexer_k` laid out one request after the other.

    Args:
        q, q_scale, weights: as for `indexer_logits_topk`.
        k, k_scale: `[N, .]`, as gathered.
        row_starts, row_ends: int `[>= T]`. Token t sees the rows [row_starts[t], row_ends[t]) that `k` has; none with
            a negative start.
        max_logits_bytes: tokens are scored as many at a time as have their float32 logits, N each, within it; one at
            least. It changes no result.
    Returns:
        int32 `[T, topk]`, contiguous: row - row_starts[t], ascending, then -1.
    """
    selected = q.new_empty(q.shape[0], topk, dtype=torch.int32)
    for rows in _tiles(q.shape[0], tokens_that_fit(k.shape[0], max_logits_bytes)):
        start = row_starts[rows, None]
        values, visible = _score_rows(
            _dequantize_queries(q[rows], q_scale[rows], cache_format),
            weights[rows],
            k,
            k_scale,
            start,
            row_ends[rows, None],
            cache_format,
        )
        entries = select_topk(values, visible, topk)
        selected[rows] = torch.where(entries >= 0, entries - start, PAD_INDEX).int()
    return selected


def select_topk(logits: Tensor, visible: Tensor, topk: int) -> Tensor:
    """int32 `[N, topk]`: the columns of `logits` and `visible` `[N, J]` that the rule of this module selects."""
    width = logits.shape[1]
    best = _selection_keys(logits, visible).topk(min(topk, width), dim=1, sorted=False).indices
    # An invisible column that filled the row moves behind the last column, and from there becomes padding.
    best = torch.where(visible.gather(1, best), best, width).sort(dim=1).values
    best = torch.where(best < width, best, PAD_INDEX).int()
    return torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=PAD_INDEX)


def _selection_keys(logits: Tensor, visible: Tensor) -> Tensor:
    """int64 `[N, J]`, all different in a row: the larger key is selected first. This makes any top-k an exact one."""
    bits = (logits + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    order = torch.where(logits.isnan(), _INT32_MIN + 1, order)
    order = torch.where(visible, order, _INT32_MIN)
    column = torch.arange(logits.shape[1], device=logits.device)
    return (order.long() << 32) | (0xFFFFFFFF - column)


def _score_pages(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Logits float32 `[n, width]`, arbitrary where not visible, and visibility bool `[n, width]`."""
    values, visible = [], []
    for entry in torch.arange(width, device=q.device).split(ENTRIES_AT_A_TIME):
        slots = paging.lookup_slots(block_table, requests[:, None], entry, block_size)
        seen = paging.valid_slots(slots, k_cache.shape[0], block_size) & (entry < context_lens[:, None])
        keys = load_indexer(k_cache, cache_format, block_size, torch.where(seen, slots, PAD_SLOT))
        values.append(_head_sum(q, weights, keys))
        visible.append(seen)
    return torch.cat(values, dim=1), torch.cat(visible, dim=1)


def _score_rows(
    q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor, starts: Tensor, ends: Tensor, cache_format: str
) -> tuple[Tensor, Tensor]:
    """Like `_score_pages` for gathered keys, `starts` and `ends` `[n, 1]`."""
    values = []
    for part, scale in zip(k.split(ENTRIES_AT_A_TIME), k_scale.split(ENTRIES_AT_A_TIME), strict=True):
        if cache_format == "plain":
            keys = part.float()
        else:
            # A view as float32 needs aligned rows, which a slice of a wider buffer need not have.
            keys = dequantize_indexer(part, scale.clone(memory_format=torch.contiguous_format), cache_format)
        values.append(_head_sum(q, weights, keys))
    entry = torch.arange(k.shape[0], device=q.device)
    return torch.cat(values, dim=1), (starts >= 0) & (entry >= starts) & (entry < ends)


def _head_sum(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float32 `[n, J]` from queries `[n, H, D]`, weights `[n, H]` and keys `[n, J, D]` or `[J, D]`."""
    dots = torch.matmul(q, keys.transpose(-1, -2)).relu()
    return torch.matmul(weights[:, None], dots)[:, 0]


def _dequantize_queries(q: Tensor, q_scale: Tensor, cache_format: str) -> Tensor:
    """float32 `[n, H, D]`. The scale of an fp8 query is already in its weights."""
    return dequantize_indexer(q, q_scale, cache_format) if cache_format == "indexer_mxfp4" else q.float()


def tokens_that_fit(width: int, max_logits_bytes: int) -> int:
    """Tokens whose logits, `width` each, fit in `max_logits_bytes`; one at least."""
    return max(1, max_logits_bytes // (_LOGIT_BYTES * max(width, 1)))


def _tiles(tokens: int, limit: int = TOKENS_AT_A_TIME) -> list[slice]:
    """Slices that cover `tokens` rows and never reach beyond them: per-token arguments may be longer."""
    step = min(limit, TOKENS_AT_A_TIME)
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]
