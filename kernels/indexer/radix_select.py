"""Search for the boundary of the K largest order keys of a row, by counting keys in bins.

The first pass divides the range of the logits into equal bins; the bin with the boundary holds few keys if the data are
smooth, and these are ranked. If it holds many, further passes divide the range of the keys that are left, until all of
them are taken or all are equal. Whatever the data, a pass divides the range by at least half the number of bins.

A tile of keys stays in registers, as `rows` runs of `run` columns. A thread holds runs that are consecutive in the row,
so that the rank of a column takes one sum over the threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device.quant import MAGNITUDE, MANTISSA_BITS
from .histogram import LISTED, block_extent, count_all, count_bins, histogram, nth_largest, read_one, take_counts
from .score_triton import INVISIBLE

ROW_ALIGN = 16
"""Columns of a row in memory are a multiple of this, so that whole vectors may be read."""
VECTOR = tl.constexpr(ROW_ALIGN)
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
LARGEST = tl.constexpr(0x7F7FFFFF)
"""Order key of the largest finite logit. That of the smallest is -1 - LARGEST."""
EXPONENT_BIAS = tl.constexpr(127)


class Shape(NamedTuple):
    """Compile-time sizes of a selection.

    Attributes:
        k, padded_k: columns to select, and them padded to a power of two.
        rows, run: runs of a tile, and columns of a run, which divides `page`. threads: of a program, or fewer.
        parts: tiles of the longest row. bins: of a pass.
        native: whether bins are counted in NVIDIA's shared memory.
        page: entries of a block of the map from entries to slots; 0 selects columns.
        dependent: whether the launch starts before the kernel that writes the keys ends (PDL).
        followed: whether it lets the next kernel start early. all_counted: see `count_all`.
    """

    k: int
    padded_k: int
    rows: int
    threads: int
    run: int
    parts: int
    bins: int
    native: bool
    page: int
    dependent: bool
    followed: bool
    all_counted: bool = False


@triton.jit
def tile_runs(SHAPE: tl.constexpr):
    """Return int32 `[rows]`, the first column of each run of a tile."""
    ROWS: tl.constexpr = SHAPE.rows
    THREADS: tl.constexpr = SHAPE.threads
    row = tl.arange(0, ROWS)
    return (row % THREADS * (ROWS // THREADS) + row // THREADS) * SHAPE.run


@triton.jit
def tile_columns(start, SHAPE: tl.constexpr):
    """Return int32 `[rows, run]`, the columns of the tile at `start`."""
    return start + tile_runs(SHAPE)[:, None] + tl.arange(0, SHAPE.run)[None, :]


@triton.jit
def load_tile(p_row, start, length, SHAPE: tl.constexpr):
    """Load int32 `[rows, run]` keys from column `start` on, INVISIBLE past the end of the row."""
    column = tile_columns(start, SHAPE)
    # Whole vectors are read: a row of the workspace is longer than the keys in it. The L1 cache is bypassed, because
    # other programs of this launch may have written them.
    m_vector = column < tl.cdiv(length, VECTOR) * VECTOR
    key = tl.load(p_row + column, mask=m_vector, other=INVISIBLE, cache_modifier=".cg")
    return tl.where(column < length, key, INVISIBLE)


@triton.jit
def _logit(key):
    """Return the float32 logit of an order key; NaN for keys that belong to none."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _key_extent(key, mask):
    """Return the smallest and the largest of the keys where `mask` is set."""
    return tl.min(tl.where(mask, key, LAST)), tl.max(tl.where(mask, key, INVISIBLE))


@triton.jit
def _thread_extents(key, THREADS: tl.constexpr):
    """Return the smallest and the largest finite key of each thread."""
    finite = (key >= -1 - LARGEST) & (key <= LARGEST)
    RUNS: tl.constexpr = key.shape[0] // THREADS
    low, high = tl.min(tl.where(finite, key, LAST), axis=1), tl.max(tl.where(finite, key, INVISIBLE), axis=1)
    return tl.min(tl.reshape(low, (RUNS, THREADS)), axis=0), tl.max(tl.reshape(high, (RUNS, THREADS)), axis=0)


@triton.jit
def _shift(lo, hi, BINS: tl.constexpr):
    """Return by how many bits the distance of lo and hi is shifted right to be less than BINS."""
    # Rounding up may give one more bit than needed.
    exponent = (hi - lo).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> MANTISSA_BITS
    LOG: tl.constexpr = BINS.bit_length() - 1
    return tl.maximum(exponent - (EXPONENT_BIAS - 1 + LOG), 0)


@triton.jit
def _bins(key, live, lo, hi, FIRST: tl.constexpr, BINS: tl.constexpr):
    """Return the bin of each key, which rises with the key; -1 for those that are not `live`.

    Bins of the FIRST pass are equal parts of the range of logits from that of lo to that of hi; a key outside is in the
    nearest bin, and NaN in bin 0. Bins of later passes are equal parts of the keys from lo to hi; a key outside is not
    live.
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
def _find_bin(counts, total, need, at, BINS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the bin that holds the `need`-th largest of `total` keys, how many are above it, and how many in it.

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
    return read_one(at, place, above, number, here, BINS, NATIVE)


@triton.jit
def _count_pass(row, lo, hi, total, need, at, FIRST: tl.constexpr, TILES: tl.constexpr, SHAPE: tl.constexpr):
    """Narrow the range of the `need`-th largest of `total` keys, which lie in lo to hi, to its bin.

    Returns the smallest and the largest key of the bin, their number, and which of them the wanted one is. If they are
    few they are ranked, and the keys equal to the wanted one are returned alone.
    """
    p_row, head, length = row
    BINS: tl.constexpr = SHAPE.bins
    NATIVE: tl.constexpr = SHAPE.native
    TILE: tl.constexpr = SHAPE.rows * SHAPE.run
    column = tile_columns(0, SHAPE)
    bins = _bins(head, column < length, lo, hi, FIRST, BINS)
    if NATIVE:
        if not FIRST:
            tl.debug_barrier()
        if SHAPE.all_counted:
            count_all(at, bins, BINS)
        else:
            count_bins(at, bins)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, SHAPE)
                count_bins(at, _bins(key, start + column < length, lo, hi, FIRST, BINS))
        tl.debug_barrier()
        counts = take_counts(at, BINS)
    else:
        number_of = histogram(bins, BINS)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, SHAPE)
                number_of += histogram(_bins(key, start + column < length, lo, hi, FIRST, BINS), BINS)
        counts = (number_of,)
    bin, above, number = _find_bin(counts, total, need, at, BINS, NATIVE)
    if NATIVE and TILES == 1 and number <= LISTED:
        nth, larger, equal = nth_largest(at, head, bins == bin, number, need - above, BINS)
        low, high = nth, nth
        number, need = equal, need - above - larger
    else:
        need -= above
        low, high = _key_extent(head, bins == bin)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                key = load_tile(p_row, start, length, SHAPE)
                other = _key_extent(key, _bins(key, start + column < length, lo, hi, FIRST, BINS) == bin)
                low, high = tl.minimum(low, other[0]), tl.maximum(high, other[1])
    return low, high, number, need


@triton.jit
def bounds(p_row, head, length, at, TILES: tl.constexpr, AGAIN: tl.constexpr, SHAPE: tl.constexpr):
    """Return lo, hi, and how many of the equal keys in [lo, hi) are selected in addition to all keys >= hi.

    The row, of any length, has at most TILES tiles, of which `head` is the first. AGAIN: see `block_extent`.
    """
    K: tl.constexpr = SHAPE.k
    THREADS: tl.constexpr = SHAPE.threads
    TILE: tl.constexpr = SHAPE.rows * SHAPE.run
    row = p_row, head, length
    # A context of up to K entries is selected whole, except for invisible entries.
    lo, room = tl.full((), INVISIBLE, tl.int32), tl.zeros((), tl.int32)
    hi = lo
    if length > K:
        need = tl.full((), K, tl.int32)
        lo, high = _thread_extents(head, THREADS)
        if TILES > 1:
            for start in range(TILE, length, TILE):
                other = _thread_extents(load_tile(p_row, start, length, SHAPE), THREADS)
                lo, high = tl.minimum(lo, other[0]), tl.maximum(high, other[1])
        if SHAPE.native:
            lo, high = block_extent(at, lo, high, AGAIN, SHAPE.bins)
        else:
            lo, high = tl.min(lo), tl.max(high)
        lo, high, number, need = _count_pass(row, lo, high, length, need, at, True, TILES, SHAPE)
        while (number != need) & (lo != high):
            lo, high, number, need = _count_pass(row, lo, high, number, need, at, False, TILES, SHAPE)
        # All of them are selected, or they are equal.
        hi, room = tl.where(number == need, lo, lo + 1), tl.where(number == need, 0, need)
    # Invisible columns are never selected.
    return lo, tl.maximum(hi, INVISIBLE + 1), tl.where(lo == INVISIBLE, 0, room)
