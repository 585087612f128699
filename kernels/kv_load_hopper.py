"""Device functions of a Hopper warpgroup that turns `fp8_ds_mla` slots into tiles of keys in shared memory.

Keys are fetched 32 at a time into registers, dequantised exactly (kv_load.py has the arithmetic) and stored as the
swizzled bfloat16 tiles that the matrix unit reads. Work is on 32-bit words throughout: bytes and halves would be taken
apart and put together again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .. import layout
from .barriers_hopper import thread_barrier
from .views_hopper import reinterpret

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
