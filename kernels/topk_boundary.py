"""Search for the boundary of the K largest order keys of a row, by two probes a pass.

At least K keys are >= lo and fewer than K are >= hi; each pass counts the keys from either probe on, and a probe that
counts K ends the search. A tile of keys stays in registers, as rows of RUN columns that a thread holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .indexer_score import INVISIBLE, NAN_KEY, order_key
from .quant import MAGNITUDE

ROW_ALIGN = 16
"""The keys of a row that exist, in memory if not in meaning, are a multiple of this."""
SMOOTH_PASSES = tl.constexpr(12)
NARROW_EVERY = tl.constexpr(4)
MARGIN = tl.constexpr(0.1)
"""Distance of the first two probes from where they are expected to count K, in standard deviations."""
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
VECTOR = tl.constexpr(ROW_ALIGN)


@triton.jit
def tile_columns(start, ROWS: tl.constexpr, RUN: tl.constexpr):
    """int32 `[ROWS, RUN]` columns of the tile at `start`."""
    return start + tl.arange(0, ROWS)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def load_tile(p_row, start, length, ROWS: tl.constexpr, RUN: tl.constexpr):
    """int32 `[ROWS, RUN]` keys from column `start` on, invisible behind the row."""
    column = tile_columns(start, ROWS, RUN)
    # Whole vectors are read: a row of the workspace is longer than the keys in it. Programs of this launch may have
    # written them, which the first cache does not see.
    m_vector = column < tl.cdiv(length, VECTOR) * VECTOR
    key = tl.load(p_row + column, mask=m_vector, other=INVISIBLE, cache_modifier=".cg")
    return tl.where(column < length, key, INVISIBLE)


@triton.jit
def _between(key, lo, hi, other):
    """`key` if it lies between lo and hi, else `other`."""
    return tl.where((key > lo) & (key < hi), key, other)


@triton.jit
def _probes(lo, hi, from_lo, from_hi, passes, K: tl.constexpr):
    """Two keys between lo and hi, from which on there are `from_lo` and `from_hi` keys; the smaller one first.

    At first those of the mean of their logits, and of the logit where a straight line through both counts has K: the
    latter comes near the boundary of smooth data soon, the former narrows what is not straight. Later both are the mean
    of the keys, which ends the search after 32 more passes whatever the data.
    """
    # The mean of two integers whose sum may not fit.
    of_keys = (lo & hi) + ((lo ^ hi) >> 1)
    low, high = _logit(lo), _logit(hi)
    mean = _between(order_key(0.5 * low + 0.5 * high), lo, hi, of_keys)
    share = ((from_lo - K).to(tl.float32) + 0.5) / (from_lo - from_hi).to(tl.float32)
    straight = _between(order_key(low + (high - low) * share), lo, hi, mean)
    smooth = passes < SMOOTH_PASSES
    return (
        tl.where(smooth, tl.minimum(mean, straight), of_keys),
        tl.where(smooth, tl.maximum(mean, straight), of_keys),
    )


@triton.jit
def _logit(key):
    """float32 logit of an order key; NaN for keys that belong to none."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(p_row, head, length, lo, hi, ROWS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr):
    """Bounds as tight as the keys between them allow: the smallest key >= lo, and one more than the largest < hi."""
    TILE: tl.constexpr = ROWS * RUN
    column = tile_columns(0, ROWS, RUN)
    smallest = tl.where((head >= lo) & (column < length), head, LAST)
    largest = tl.where(head < hi, head, INVISIBLE)
    if TILES > 1:
        for start in range(TILE, length, TILE):
            key = load_tile(p_row, start, length, ROWS, RUN)
            smallest = tl.minimum(smallest, tl.where((key >= lo) & (start + column < length), key, LAST))
            largest = tl.maximum(largest, tl.where(key < hi, key, INVISIBLE))
    return tl.min(smallest), tl.max(largest) + 1


@triton.jit
def _hits(key, first, second, HALF: tl.constexpr):
    """Whether a key is >= first, in bit HALF, and whether it is >= second, which is not less, in bit 0."""
    return tl.where(key >= second, (1 << HALF) + 1, tl.where(key >= first, 1 << HALF, 0))


@triton.jit
def _count(
    p_row, head, length, first, second,
    ROWS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """How many keys are >= first, and how many are >= second. A half of a WORD holds either."""
    TILE: tl.constexpr = ROWS * RUN
    HALF: tl.constexpr = WORD.primitive_bitwidth // 2
    hits = _hits(head, first, second, HALF)
    if TILES > 1:
        for start in range(TILE, length, TILE):
            key = load_tile(p_row, start, length, ROWS, RUN)
            hits += _hits(key, first, second, HALF)
    both = tl.sum(hits.to(WORD))
    return (both >> HALF).to(tl.int32), (both & ((1 << HALF) - 1)).to(tl.int32)


@triton.jit
def _guess(head, length, lo, hi, K: tl.constexpr, TILE: tl.constexpr):
    """The first two probes: around where the K-th largest of `length` normal logits with this mean and spread is.

    Both are halfway between lo and hi if there are logits that are not finite.
    """
    # What is not visible counts as 0.
    logit = tl.where(head > NAN_KEY, _logit(head), 0.0)
    number = tl.minimum(length, TILE).to(tl.float32)
    mean = tl.sum(logit) / number
    spread = tl.sqrt(tl.maximum(tl.sum(logit * logit) / number - mean * mean, 0.0))
    # The quantile as a function of the logarithm of the odds, to 0.03.
    odds = tl.log((length.to(tl.float32) - K) / K)
    quantile = odds * (0.633 - 0.0273 * tl.abs(odds))
    halfway = (lo & hi) + ((lo ^ hi) >> 1)
    first = _between(order_key(mean + (quantile - MARGIN) * spread), lo, hi, halfway)
    second = _between(order_key(mean + (quantile + MARGIN) * spread), lo, hi, halfway)
    return tl.minimum(first, second), tl.maximum(first, second)


@triton.jit
def _boundary(
    p_row, head, length,
    K: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """lo, hi and the number of keys >= hi for a row of more than K columns in at most TILES tiles, `head` the first."""
    lo, hi = _narrow(p_row, head, length, INVISIBLE, LAST, ROWS, RUN, TILES)
    from_lo, from_hi, passes = tl.zeros_like(lo) + length, tl.zeros_like(lo), tl.zeros_like(lo)
    first, second = _guess(head, length, lo, hi, K, ROWS * RUN)
    while (hi - lo != 1) & (from_hi != K):
        from_first, from_second = _count(p_row, head, length, first, second, ROWS, RUN, TILES, WORD)
        # Of two probes that both bound the boundary from one side, the nearer one does.
        fits, both_fit = from_second <= K, from_first <= K
        hi = tl.where(both_fit, first, tl.where(fits, second, hi))
        from_hi = tl.where(both_fit, from_first, tl.where(fits, from_second, from_hi))
        fills, both_fill = from_first >= K, from_second >= K
        lo = tl.where(both_fill, second, tl.where(fills, first, lo))
        from_lo = tl.where(both_fill, from_second, tl.where(fills, from_first, from_lo))
        passes += 1
        # A long search may be one between few keys, all equal perhaps.
        if (passes >= SMOOTH_PASSES) & (passes % NARROW_EVERY == 0) & (from_hi != K):
            lo, hi = _narrow(p_row, head, length, lo, hi, ROWS, RUN, TILES)
        first, second = _probes(lo, hi, from_lo, from_hi, passes, K)
    return lo, hi, from_hi


@triton.jit
def bounds(p_row, head, length, K: tl.constexpr, ROWS, RUN: tl.constexpr, TILES: tl.constexpr, WORD: tl.constexpr):
    """lo, hi and how many keys in [lo, hi) fit, for a row of any length."""
    # A context that fits is taken whole, but for what is not visible.
    lo, hi, above = tl.full((), INVISIBLE, tl.int32), tl.full((), INVISIBLE + 1, tl.int32), tl.full((), K, tl.int32)
    if length > K:
        lo, hi, above = _boundary(p_row, head, length, K, ROWS, RUN, TILES, WORD)
    # Invisible columns never fill the row.
    return lo, hi, tl.where(lo == INVISIBLE, 0, K - above)
