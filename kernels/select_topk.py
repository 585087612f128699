"""Exact selection of the K largest order keys of a row, listed in ascending column order.

The boundary is found by bisection. At least K keys are >= lo and fewer than K are >= hi; each pass counts the keys from
the middle on, and one that counts K ends the search. Keys >= hi are taken, and of those in [lo, hi), which are equal by
then, the first ones that fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import PAD_INDEX
from .indexer_score import INVISIBLE, order_key, visible_entries
from .quant import MAGNITUDE

ROW_ALIGN = 16
"""The keys of a row that exist, in memory if not in meaning, are a multiple of this."""
PAD = tl.constexpr(PAD_INDEX)
SMOOTH_PASSES = tl.constexpr(14)
NARROW_EVERY = tl.constexpr(4)
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
VECTOR = tl.constexpr(ROW_ALIGN)
HALF_BITS = tl.constexpr(16)
HALF_MASK = tl.constexpr((1 << 16) - 1)


@triton.jit
def _load_tile(p_row, start, length, TILE: tl.constexpr):
    """int32 `[TILE]` keys from column `start` on, invisible behind the row."""
    column = start + tl.arange(0, TILE)
    # Whole vectors are read: a row of the workspace is longer than the keys in it.
    key = tl.load(p_row + column, mask=column < tl.cdiv(length, VECTOR) * VECTOR, other=INVISIBLE)
    return tl.where(column < length, key, INVISIBLE)


@triton.jit
def _middle(lo, hi, passes):
    """A key between lo and hi.

    At first that of the mean of their logits, which comes near the boundary of smooth data soon; later their own mean,
    which ends the search after 32 more passes whatever the data.
    """
    # The mean of two integers whose sum may not fit.
    of_keys = (lo & hi) + ((lo ^ hi) >> 1)
    of_logits = order_key(0.5 * _logit(lo) + 0.5 * _logit(hi))
    return tl.where((passes < SMOOTH_PASSES) & (of_logits > lo) & (of_logits < hi), of_logits, of_keys)


@triton.jit
def _logit(key):
    """float32 logit of an order key; NaN for keys that belong to none."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(p_row, head, length, lo, hi, TILE: tl.constexpr):
    """Bounds as tight as the keys between them allow: the smallest key >= lo, and one more than the largest < hi."""
    column = tl.arange(0, TILE)
    smallest = tl.where((head >= lo) & (column < length), head, LAST)
    largest = tl.where(head < hi, head, INVISIBLE)
    for start in range(TILE, length, TILE):
        key = _load_tile(p_row, start, length, TILE)
        smallest = tl.minimum(smallest, tl.where((key >= lo) & (start + column < length), key, LAST))
        largest = tl.maximum(largest, tl.where(key < hi, key, INVISIBLE))
    return tl.min(smallest, axis=0), tl.max(largest, axis=0) + 1


@triton.jit
def _boundary(p_row, head, length, K: tl.constexpr, TILE: tl.constexpr):
    """lo, hi and the number of keys >= hi for a row of more than K columns, of which `head` is the first tile."""
    lo, hi = _narrow(p_row, head, length, INVISIBLE, LAST, TILE)
    above, passes = tl.zeros_like(lo), tl.zeros_like(lo)
    while (hi - lo != 1) & (above != K):
        middle = _middle(lo, hi, passes)
        hits = (head >= middle).to(tl.int32)
        for start in range(TILE, length, TILE):
            hits += (_load_tile(p_row, start, length, TILE) >= middle).to(tl.int32)
        count = tl.sum(hits, axis=0)
        lo = tl.where(count >= K, middle, lo)
        hi = tl.where(count <= K, middle, hi)
        above = tl.where(count <= K, count, above)
        passes += 1
        # A long search may be one between few keys, all equal perhaps.
        if (passes >= SMOOTH_PASSES) & (passes % NARROW_EVERY == 0) & (above != K):
            lo, hi = _narrow(p_row, head, length, lo, hi, TILE)
    return lo, hi, above


@triton.jit
def _take(p_out, key, start, lo, hi, room, above, equal, TILE: tl.constexpr):
    """Write the taken columns of a tile. `above` and `equal` count those before it; both are returned for the next."""
    is_above = key >= hi
    is_equal = (key >= lo) & (key < hi)
    # Both counts in one scan: a tile has fewer columns than fit in half a word.
    both = (is_above.to(tl.int32) << HALF_BITS) | is_equal.to(tl.int32)
    before = tl.cumsum(both, axis=0) - both
    rank = equal + (before & HALF_MASK)
    place = above + (before >> HALF_BITS) + tl.minimum(rank, room)
    tl.store(p_out + place, start + tl.arange(0, TILE), mask=is_above | (is_equal & (rank < room)))
    total = tl.sum(both, axis=0)
    return above + (total >> HALF_BITS), equal + (total & HALF_MASK)


@triton.jit(
    do_not_specialize=["table_rows"],
    do_not_specialize_on_alignment=["p_requests", "p_lens"],
)
def select_topk_kernel(
    p_out,  # [T, K] int32, contiguous
    p_keys,  # [T, >= reach, a multiple of ROW_ALIGN] int32 order keys of the context
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    key_stride,
    token_strides,  # of requests and lens
    table_rows,
    reach,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program p selects for token p. The first TILE keys of a row stay in registers, the others are read again."""
    token = tl.program_id(0).to(tl.int64)
    _, length = visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach)
    p_row, p_selected = p_keys + token * key_stride, p_out + token * K
    head = _load_tile(p_row, 0, length, TILE)
    # A context that fits is taken whole, but for what is not visible.
    lo, hi, above = tl.full((), INVISIBLE, tl.int32), tl.full((), INVISIBLE + 1, tl.int32), tl.full((), K, tl.int32)
    if length > K:
        lo, hi, above = _boundary(p_row, head, length, K, TILE)
    # Invisible columns never fill the row.
    room = tl.where(lo == INVISIBLE, 0, K - above)
    taken, equal = _take(p_selected, head, 0, lo, hi, room, 0, 0, TILE)
    for start in range(TILE, length, TILE):
        key = _load_tile(p_row, start, length, TILE)
        taken, equal = _take(p_selected, key, start, lo, hi, room, taken, equal, TILE)
    o_k = tl.arange(0, PADDED_K)
    tl.store(p_selected + o_k, PAD, mask=(o_k >= taken + tl.minimum(equal, room)) & (o_k < K))
