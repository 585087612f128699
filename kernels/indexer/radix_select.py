"""Search for the boundary of the K largest order keys of a row, by counting keys in bins.

The first pass cuts the range of the logits into equal bins, of which the one where the boundary lies holds few keys if
the data are smooth. These are ranked. Where they are many, other passes cut the range of the keys that are left, until
all of them are taken or all are equal: whatever the data, each divides the range by half of the number of bins or more.

A tile of keys stays in registers, as ROWS runs of RUN columns. A thread of THREADS holds runs that lie one behind the
other in the row, so that what comes before a column takes one sum over the threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.quant import MAGNITUDE, MANTISSA_BITS
from .histogram import LISTED, add, count, extent, nth_of_few, only, take
from .score_triton import INVISIBLE

ROW_ALIGN = 16
"""The keys of a row that exist, in memory if not in meaning, are a multiple of this."""
VECTOR = tl.constexpr(ROW_ALIGN)
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
LARGEST = tl.constexpr(0x7F7FFFFF)
"""Order key of the largest finite logit. That of the smallest is -1 - LARGEST."""
EXPONENT_BIAS = tl.constexpr(127)


@triton.jit
def tile_runs(ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr):
    """int32 `[ROWS]` first column of each run of a tile."""
    row = tl.arange(0, ROWS)
    return (row % THREADS * (ROWS // THREADS) + row // THREADS) * RUN


@triton.jit
def tile_columns(start, ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr):
    """int32 `[ROWS, RUN]` columns of the tile at `start`."""
    return start + tile_runs(ROWS, THREADS, RUN)[:, None] + tl.arange(0, RUN)[None, :]


@triton.jit
def load_tile(p_row, start, length, ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr):
    """int32 `[ROWS, RUN]` keys from column `start` on, invisible behind the row."""
    column = tile_columns(start, ROWS, THREADS, RUN)
    # Whole vectors are read: a row of the workspace is longer than the keys in it. Programs of this launch may have
    # written them, which the first cache does not see.
    m_vector = column < tl.cdiv(length, VECTOR) * VECTOR
    key = tl.load(p_row + column, mask=m_vector, other=INVISIBLE, cache_modifier=".cg")
    return tl.where(column < length, key, INVISIBLE)


@triton.jit
def _logit(key):
    """float32 logit of an order key; NaN for keys that belong to none."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _extent(key, mask):
    """The smallest and the largest of the keys where `mask` says so."""
    return tl.min(tl.where(mask, key, LAST)), tl.max(tl.where(mask, key, INVISIBLE))


@triton.jit
def _thread_extents(key, THREADS: tl.constexpr):
    """The smallest and the largest finite key of each thread."""
    finite = (key >= -1 - LARGEST) & (key <= LARGEST)
    RUNS: tl.constexpr = key.shape[0] // THREADS
    low, high = tl.min(tl.where(finite, key, LAST), axis=1), tl.max(tl.where(finite, key, INVISIBLE), axis=1)
    return tl.min(tl.reshape(low, (RUNS, THREADS)), axis=0), tl.max(tl.reshape(high, (RUNS, THREADS)), axis=0)


@triton.jit
def _shift(lo, hi, BINS: tl.constexpr):
    """By how many bits the distance of lo and hi is shifted right to be less than BINS."""
    # Rounding up may give one more bit than needed.
    exponent = (hi - lo).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> MANTISSA_BITS
    LOG: tl.constexpr = BINS.bit_length() - 1
    return tl.maximum(exponent - (EXPONENT_BIAS - 1 + LOG), 0)


@triton.jit
def _bins(key, live, lo, hi, FIRST: tl.constexpr, BINS: tl.constexpr):
    """The bin of each key, which rises with the key; -1 for those that are not `live`.

    Bins of the FIRST pass are equal parts of the logits from that of lo to that of hi, and what lies outside is in the
    nearest, or in bin 0 if it has no number. Bins of another pass are equal parts of the keys from lo to hi, and what
    lies outside is not live.
    """
    if FIRST:
        lowest = _logit(lo)
        place = (_logit(key) - lowest) * ((BINS - 1.0) / (_logit(hi) - lowest))
        bin = tl.minimum(tl.where(place > 0.0, place, 0.0), BINS - 1.0).to(tl.int32)
    else:
        bin = ((key - lo).to(tl.uint32) >> _shift(lo, hi, BINS).to(tl.uint32)).to(tl.int32)
        live &= (key >= lo) & (key <= hi)
    return tl.where(live, bin, -1)


@triton.jit
def _locate(counts, total, need, at, BINS: tl.constexpr, NATIVE: tl.constexpr):
    """The bin that holds the `need`-th largest of `total` keys, how many are above it, and how many in it.

    `counts` are those of each group of neighbouring bins, a tensor for each member.
    """
    GROUP: tl.constexpr = len(counts)
    of_group = counts[0]
    for i in tl.static_range(1, GROUP):
        of_group += counts[i]
    # Keys in this bin and above.
    upwards = total - (tl.cumsum(of_group) - of_group)
    bin = tl.arange(0, BINS // GROUP) * GROUP
    here = (upwards >= need) & (upwards - of_group < need)
    above, number, place = upwards, of_group, bin
    for i in tl.static_range(GROUP):
        fits = (upwards >= need) & (upwards - counts[i] < need)
        above = tl.where(fits, upwards - counts[i], above)
        number = tl.where(fits, counts[i], number)
        place = tl.where(fits, bin + i, place)
        upwards -= counts[i]
    return only(at, place, above, number, here, BINS, NATIVE)


@triton.jit
def _pass(
    p_row, head, length, lo, hi, total, need, at, FIRST: tl.constexpr,
    ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    BINS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Of `total` keys from lo to hi those in the bin of the `need`-th: the smallest, the largest, how many they are,
    and which of them that is. Of few, those that are equal to it."""
    TILE: tl.constexpr = ROWS * RUN
    column = tile_columns(0, ROWS, THREADS, RUN)
    bins = _bins(head, column < length, lo, hi, FIRST, BINS)
    if NATIVE:
        if not FIRST:
            tl.debug_barrier()
        add(at, bins)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, ROWS, THREADS, RUN)
                add(at, _bins(key, start + column < length, lo, hi, FIRST, BINS))
        tl.debug_barrier()
        counts = take(at, BINS)
    else:
        histogram = count(bins, BINS)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, ROWS, THREADS, RUN)
                histogram += count(_bins(key, start + column < length, lo, hi, FIRST, BINS), BINS)
        counts = (histogram,)
    bin, above, number = _locate(counts, total, need, at, BINS, NATIVE)
    if NATIVE and TILES == 1 and number <= LISTED:
        nth, larger, equal = nth_of_few(at, head, bins == bin, number, need - above, BINS)
        low, high = nth, nth
        number, need = equal, need - above - larger
    else:
        need -= above
        low, high = _extent(head, bins == bin)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, ROWS, THREADS, RUN)
                other = _extent(key, _bins(key, start + column < length, lo, hi, FIRST, BINS) == bin)
                low, high = tl.minimum(low, other[0]), tl.maximum(high, other[1])
    return low, high, number, need


@triton.jit
def bounds(
    p_row, head, length, at,
    K: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    BINS: tl.constexpr, NATIVE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """lo, hi and how many of the keys in [lo, hi), which are equal, fit beside those >= hi; for a row of any length.

    The row has at most TILES tiles, of which `head` is the first.
    """
    # A context that fits is taken whole, but for what is not visible.
    lo, room = tl.full((), INVISIBLE, tl.int32), tl.zeros((), tl.int32)
    hi = lo
    if length > K:
        need = tl.full((), K, tl.int32)
        lo, high = _thread_extents(head, THREADS)
        if TILES > 1:
            for start in range(ROWS * RUN, length, ROWS * RUN):
                other = _thread_extents(load_tile(p_row, start, length, ROWS, THREADS, RUN), THREADS)
                lo, high = tl.minimum(lo, other[0]), tl.maximum(high, other[1])
        if NATIVE:
            lo, high = extent(at, lo, high, AGAIN, BINS)
        else:
            lo, high = tl.min(lo), tl.max(high)
        lo, high, number, need = _pass(
            p_row, head, length, lo, high, length, need, at, True, ROWS, THREADS, RUN, TILES, BINS, NATIVE
        )
        while (number != need) & (lo != high):
            lo, high, number, need = _pass(
                p_row, head, length, lo, high, number, need, at, False, ROWS, THREADS, RUN, TILES, BINS, NATIVE
            )
        # All of them are taken, or they are equal.
        hi, room = tl.where(number == need, lo, lo + 1), tl.where(number == need, 0, need)
    # Invisible columns never fill the row.
    return lo, tl.maximum(hi, INVISIBLE + 1), tl.where(lo == INVISIBLE, 0, room)
