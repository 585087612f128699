"""Device functions of a Hopper warpgroup that finds where a token's keys lie, for another that fetches them.

A token attends two caches, one after the other, in blocks of keys that are of one cache each. What slots mean is worked
out once for a key, by a warpgroup that has the time; who fetches it then sees one row of keys, and needs no registers
for two caches.

A source is a cache as int32, the distance of its pages in units of 16 bytes, log2 of the tokens in a page, indices
`[T, n]`, the stride of their rows, how many of the token's count, and the slots of the cache. The second source has the
blocks from `boundary` on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .kv_ahead_hopper import ask_for_rows
from .kv_load_hopper import place_of

KEY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_LINES = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
LINES = gl.constexpr(_LINES)
LINE_KEY = gl.constexpr(gl.SliceLayout(1, _LINES))


@gluon.jit
def find_keys(source0, source1, token, boundary, block, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """int32 slots of N keys from the first of a block of BLOCK_N on; -1 for what is none, and behind the last."""
    o_key = gl.arange(0, N, KEY)
    o_block = block + o_key // BLOCK_N
    first = o_block < boundary
    column = (o_block - gl.where(first, 0, boundary)) * BLOCK_N + o_key % BLOCK_N
    p_slot0 = source0[3] + token * source0[4] + column
    p_slot1 = source1[3] + token * source1[4] + column
    # An index may be of 64 bits, and is compared as it is.
    slot0 = gl.load(p_slot0, mask=first & (column < source0[5]), other=-1)
    slot1 = gl.load(p_slot1, mask=(o_block >= boundary) & (column < source1[5]), other=-1)
    slot0 = gl.where((slot0 >= 0) & (slot0 < source0[6]), slot0, -1).to(gl.int32)
    slot1 = gl.where((slot1 >= 0) & (slot1 < source1[6]), slot1, -1).to(gl.int32)
    return gl.where(first, slot0, slot1)


@gluon.jit
def place_keys(source0, source1, boundary, block, slot, rows, scales, lives, BLOCK_N: gl.constexpr):
    """Where the keys `slot` are, the first of them those of a block, into shared memory, as `produce_keys` wants it."""
    first = block + gl.arange(0, slot.shape[0], KEY) // BLOCK_N < boundary
    chunks, log_page = gl.where(first, source0[1], source1[1]), gl.where(first, source0[2], source1[2])
    row, scale = place_of(slot, chunks, log_page)
    rows.store(row)
    scales.store(scale)
    lives.store(gl.where(slot >= 0, 1.0, 0.0))


@gluon.jit
def ask_for_block(source0, source1, boundary, block, rows, scales):
    """Ask the L2 cache for the keys of a block that `place_keys` has placed."""
    p_words = gl.where(block < boundary, source0[0], source1[0])
    ask_for_rows(p_words, rows.load(LINE_KEY), scales.load(LINE_KEY), LINES)
