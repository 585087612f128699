"""Device functions of a Hopper warpgroup that turns `fp8_ds_mla` slots into tiles of keys in shared memory.

Keys are fetched 32 at a time into registers, dequantised exactly (kv_load.py has the arithmetic) and stored as the
swizzled bfloat16 tiles that the matrix unit reads. Work is on 32-bit words throughout: bytes and halves would be taken
apart and put together again.

Device functions of a Hopper kernel that starts before the one in front of it has ended: what a token attends.

What they load may be about to change. They read past the first-level cache, which would keep it, and a kernel calls
them twice: before it waits, to ask the L2 cache for keys as far as the step's metadata is there already, and after.

Device functions of a Hopper warpgroup that finds where a token's keys lie, for another that fetches them.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ... import layout
from ..hopper.gluon import reinterpret, thread_barrier

# A thread holds all tiles of a key, so that which one is not quantised is known when compiling.
_WORDS = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
WORDS = gl.constexpr(_WORDS)
SLOTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _WORDS)))
ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))

FETCH = gl.constexpr(32)  # keys in registers
CACHED = gl.constexpr("")  # how memory is read that nobody writes meanwhile
HALF = gl.constexpr(layout.HEAD_DIM // 2)  # words of a key
TILES = gl.constexpr(layout.FP8_DS_MLA_TILES)
TILE_WORDS = gl.constexpr(layout.KV_TILE // 4)
ROW_WORDS = gl.constexpr(layout.FP8_DS_MLA.data // 4)
ROW_ALIGN = gl.constexpr(4)  # words
ROPE_WORD = gl.constexpr(layout.NOPE_DIM // 4)
ROPE_WORDS = gl.constexpr(layout.ROPE_DIM // 2)
SCALES_PER_ROW = gl.constexpr(layout.FP8_DS_MLA.data // layout.FP8_DS_MLA.scale)  # scale rows in a data row
UE8M0_BIAS = gl.constexpr(layout.UE8M0_BIAS)
EXPONENT = gl.constexpr(120)  # what the biases of bfloat16 and e4m3 differ by
LAST_BYTE = gl.constexpr(134)  # UE8M0 of 2^7, the largest scale whose factor is a bfloat16
BOTH = gl.constexpr(0x00800080)  # exponent 1 of a bfloat16, in both halves of a word


@gluon.jit
def _scaled_codes(codes, factor):
    """Four e4m3 codes in each int32, scaled: two words of bfloat16 pairs. A factor is a bfloat16, twice in a word.

    What moves a code spreads its sign over the byte above it: a shift and a mask leave the bfloat16.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xB3A2;
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 a, a, 0x87f087f0;
        and.b32 b, b, 0x87f087f0;
        mul.rn.bf16x2 $0, a, $3;
        mul.rn.bf16x2 $1, b, $3;
        }""",
        "=r,=r,r,r",
        [codes, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def row_length(p_lens, stride, token, width, CACHE: gl.constexpr = CACHED):
    """int32 number of columns that count in a token's row of indices."""
    length = gl.load(p_lens + token * stride, cache_modifier=CACHE)
    return gl.minimum(gl.maximum(length, 0), width).to(gl.int32)


@gluon.jit
def place_of(slot, page_chunks, log_page):
    """Where the keys `slot` are, the first in place of none: int64 words of their row, int64 numbers of their scales.

    page_chunks: distance of two pages in units of 16 bytes; log_page: of the tokens in a page.
    """
    safe = gl.where(slot >= 0, slot, 0)
    page = (safe >> log_page).to(gl.int64)
    size = 1 << log_page
    offset = safe & (size - 1)
    return page * (page_chunks * 4) + offset * ROW_WORDS, page * (page_chunks * 2) + (size * SCALES_PER_ROW + offset)


@gluon.jit
def fetch_keys(
    p_words, page_chunks, slot, log_page,
    WORDS: gl.constexpr = WORDS, ROPES: gl.constexpr = ROPES, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """As `fetch_rows`, of what is stored at `slot` `[N]`, -1 for what is none."""
    row, scale = place_of(slot, page_chunks, log_page)
    return fetch_rows(p_words, row, scale, slot >= 0, WORDS, ROPES, CACHE)


@gluon.jit
def fetch_rows(
    p_words, row, scale, live,
    WORDS: gl.constexpr = WORDS, ROPES: gl.constexpr = ROPES, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """What is stored at a `place_of` `[N]`: words of codes `[N, 8, 16]`, of rope `[N, 32]`, and scales, a number each.

    The last tile of codes is empty. Where not `live` the rope is zero and the rest is the first key's. Codes are finite
    whatever their bits are, so that a factor of zero clears them, and no register has to be zeroed in front of a load.
    """
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, TILES + 1, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0), 2)
    o_word = gl.expand_dims(gl.expand_dims(gl.arange(0, TILE_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, WORDS))), 0), 1)
    p_codes = p_words + (gl.expand_dims(gl.expand_dims(row, 1), 2) + o_word)
    codes = gl.load(p_codes + tile * TILE_WORDS, mask=tile < TILES, other=0, cache_modifier=CACHE)
    rope_row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, ROPES)), 1)
    m_rope = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, ROPES)), 1)
    o_rope = gl.expand_dims(gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, ROPES)), 0)
    rope = gl.load(p_words + (rope_row + o_rope + ROPE_WORD), mask=m_rope, other=0, cache_modifier=CACHE)
    # A key's scales are one number: taking a vector of bytes apart would wait for the load here.
    p_scales = p_words.to(gl.pointer_type(gl.int64), bitcast=True)
    return codes, rope, gl.load(p_scales + scale, cache_modifier=CACHE)


@gluon.jit
def dequantize_keys(codes, rope, scales, live, WIDE: gl.constexpr, WORDS: gl.constexpr = WORDS):
    """Words of bfloat16 pairs `[N, 256]` from what `fetch_keys` loaded; see kv_load.py for the arithmetic."""
    tile = gl.expand_dims(gl.arange(0, TILES + 1, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0)
    byte = (gl.expand_dims(scales, 1) >> (tile * 8).to(gl.int64)).to(gl.int32) & 255
    both = gl.expand_dims(gl.where(live, BOTH, 0), 1)
    if WIDE:
        factor = (gl.minimum(byte, LAST_BYTE) + EXPONENT) * both
    else:
        factor = gl.minimum(byte + EXPONENT, 255) * both
    factor, _ = gl.broadcast(gl.expand_dims(factor, 2), codes)
    low, high = _scaled_codes(codes, factor)
    if WIDE:
        rest = (gl.maximum(byte, LAST_BYTE) + (UE8M0_BIAS - LAST_BYTE)) * BOTH
        rest, _ = gl.broadcast(gl.expand_dims(rest, 2), codes)
        low, high = _times(low, rest), _times(high, rest)
    rope_low, rope_high = gl.split(gl.reshape(rope, [rope.shape[0], TILE_WORDS, 2]))
    rope_low = gl.expand_dims(gl.convert_layout(rope_low, gl.SliceLayout(1, WORDS)), 1)
    rope_high = gl.expand_dims(gl.convert_layout(rope_high, gl.SliceLayout(1, WORDS)), 1)
    is_rope = gl.expand_dims(tile, 2) == TILES
    pairs = gl.join(gl.where(is_rope, rope_low, low), gl.where(is_rope, rope_high, high))
    return gl.reshape(pairs, [rope.shape[0], HALF])


@gluon.jit
def _times(pairs, factor):
    """Words of bfloat16 pairs times bfloat16 factors, each twice in a word."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, factor], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _fetch(p_words0, p_words1, boundary, block, place, rows, scales, lives, PART: gl.constexpr):
    """`fetch_rows` of keys PART * FETCH on of a block, and which of them are keys."""
    row = rows.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    scale = scales.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    live = lives.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS) > 0
    # What lies in shared memory is a multiple of nothing, for all that the compiler knows.
    row = gl.multiple_of(row, ROW_ALIGN)
    codes, rope, words = fetch_rows(gl.where(block < boundary, p_words0, p_words1), row, scale, live)
    return codes, rope, words, live


@gluon.jit
def produce_keys(
    p_words0, p_words1, boundary, begin, end, rows, scales, lives, placed, keys, ready, free, WIDE: gl.constexpr
):
    """Blocks `begin` to `end` of a token's keys into the ring of buffers: of the second cache from `boundary` on.

    Args:
        p_words0, p_words1: the caches as int32.
        rows, scales: int64 `[places, keys of a block]`, shared, see `place_of`; lives: float32, 1 for keys and 0 for
            what is none. Block j of the program has place j % places: the first three are there when `placed` is
            done, and each of the others when the block three in front of it is freed.
        keys: bfloat16 `[buffers, keys of a block, 512]`, shared. `ready` and `free` are a barrier for each buffer.
    """
    BUFFERS: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    PARTS: gl.constexpr = BLOCK_N // FETCH
    PLACES: gl.constexpr = rows.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, HALF], SWIZZLED_WORDS)
    if end > begin:
        mbarrier.wait(placed, 0)
        codes, rope, numbers, live = _fetch(p_words0, p_words1, boundary, begin, 0, rows, scales, lives, 0)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            for part in gl.static_range(PARTS):
                now_codes, now_rope, now_numbers, now_live = codes, rope, numbers, live
                # The next keys are on their way while these are dequantised.
                following = (part + 1) // PARTS
                codes, rope, numbers, live = _fetch(
                    p_words0, p_words1, boundary, block + following, (number + following) % PLACES, rows, scales, lives,
                    (part + 1) % PARTS,
                )  # fmt: skip
                pairs = dequantize_keys(now_codes, now_rope, now_numbers, now_live, WIDE)
                if part == 0:
                    mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
                words.index(buffer).slice(part * FETCH, FETCH, 0).store(pairs)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)


LINE_WORDS = gl.constexpr(32)  # of the L2 cache
SCALE_WORDS = gl.constexpr(layout.FP8_DS_MLA.scale // 4)


@gluon.jit
def extent(p_lens0, lens0_stride, p_lens1, lens1_stride, width0, width1, token, BLOCK_N: gl.constexpr):
    """Of a token: how long its rows of indices are, and blocks of the first and of both."""
    length0 = row_length(p_lens0, lens0_stride, token, width0, ".cg")
    length1 = row_length(p_lens1, lens1_stride, token, width1, ".cg")
    blocks0 = (length0 + BLOCK_N - 1) // BLOCK_N
    return length0, length1, blocks0, blocks0 + (length1 + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def angles(p_positions, position_stride, p_table, table_stride, max_pos, token):
    """Cosines and sines of a token's position."""
    position = gl.load(p_positions + token * position_stride, cache_modifier=".cg").to(gl.int64)
    return p_table + gl.minimum(gl.maximum(position, 0), max_pos - 1) * table_stride


@gluon.jit
def slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, block, N: gl.constexpr, SLOTS: gl.constexpr):
    """int32 slots of a block of N keys, in layout SLOTS; -1 for what is none, and in blocks behind the last."""
    inner = block < blocks0
    column = (block - gl.where(inner, 0, blocks0)) * N + gl.arange(0, N, SLOTS)
    live = column < gl.where(inner, length0, length1)
    slot = gl.load(gl.where(inner, p_row0, p_row1) + column, mask=live, other=-1, cache_modifier=".cg")
    return gl.where((slot >= 0) & (slot < gl.where(inner, capacity0, capacity1)), slot, -1).to(gl.int32)


@gluon.jit
def ask(pointers):
    """Ask the L2 cache for what lies there. Nothing is read, so that it need not be there yet."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask_for_keys(p_words, page_chunks, slot, log_page, LINES: gl.constexpr):
    """Ask the L2 cache for what is stored at `slot`, the first key in place of none: its lines, and that of its scales.

    In a row of LINES, a line for each of eight threads, the last of them the scales'.
    """
    row, scale = place_of(slot, page_chunks, log_page)
    ask_for_rows(p_words, row, scale, LINES)


@gluon.jit
def ask_for_rows(p_words, row, scale, LINES: gl.constexpr):
    """As `ask_for_keys`, of keys at a `place_of`."""
    o_line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LINES)), 0)
    data = gl.expand_dims(row, 1) + gl.minimum(o_line * LINE_WORDS, ROW_WORDS - 1)
    ask(p_words + gl.where(o_line == 7, gl.expand_dims(scale * SCALE_WORDS, 1), data))


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
