"""Gluon device functions for sm_90 that load keys into tiles of shared memory: `fp8_ds_mla`, grids, or bfloat16 rows.

A warpgroup loads `fp8_ds_mla` keys into registers, dequantises them exactly (common.py has the arithmetic) and stores
them as the swizzled bfloat16 tiles that `wgmma` reads. All work is on 32-bit words: bytes and halves would be unpacked
and packed again. PLAIN keys are such words already, and are copied (cp.async) without passing through registers. GRIDS
are the caches of V4.1: the window in mxfp8, the other cache in nvfp4 (grid_format.py).

A token attends two caches, one after the other, in blocks of keys that belong to one cache each; the extra cache has
the blocks from `boundary` on. In the kernel for many heads, a warpgroup with time to spare resolves slots to addresses
in shared memory, so that the producer sees one row of keys and needs no registers for two caches.

A kernel that starts before the previous one ends (PDL) prefetches keys into L2 as far as the metadata of the step is
already there, and loads the same metadata again after the wait: past L1, which would keep the old values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ... import layout
from ..hopper.gluon import reinterpret, thread_barrier
from ..hopper.tma import copy_elements

# A thread holds all tiles of a key, so that the tile that is not quantised is known at compile time.
_WORDS = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
WORDS = gl.constexpr(_WORDS)
SLOTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _WORDS)))
# Eight nibbles of a word become 16 bytes, so that two words fill what WORDS fills with four.
_NIBBLES = gl.BlockedLayout([1, 8, 2], [8, 1, 4], [4, 1, 1], [2, 1, 0])
NIBBLES = gl.constexpr(_NIBBLES)
ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
KEY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_LINES = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
LINES = gl.constexpr(_LINES)
LINE_KEY = gl.constexpr(gl.SliceLayout(1, _LINES))
# Eight threads copy a line of a row.
_COPIES = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
COPIES = gl.constexpr(_COPIES)
COPIED = gl.constexpr(gl.SliceLayout(1, _COPIES))

FETCH = gl.constexpr(32)  # keys in registers
CACHED = gl.constexpr("")  # cache modifier for memory that no running kernel writes
LINE_WORDS = gl.constexpr(32)  # of L2
SCALE_WORDS = gl.constexpr(layout.FP8_DS_MLA.scale // 4)
HALF = gl.constexpr(layout.HEAD_DIM // 2)  # words of a key
TILES = gl.constexpr(layout.FP8_DS_MLA_TILES)
TILE_WORDS = gl.constexpr(layout.KV_TILE // 4)
ROW_WORDS = gl.constexpr(layout.FP8_DS_MLA.data // 4)
ROW_ALIGN = gl.constexpr(4)  # words
ROPE_WORD = gl.constexpr(layout.NOPE_DIM // 4)
ROPE_WORDS = gl.constexpr(layout.ROPE_DIM // 2)
SCALES_PER_ROW = gl.constexpr(layout.FP8_DS_MLA.data // layout.FP8_DS_MLA.scale)  # scale rows in a data row
_MXFP8 = layout.row_layout("mxfp8", layout.HEAD_DIM)
_NVFP4 = layout.row_layout("nvfp4", layout.HEAD_DIM)
MXFP8_WORDS, MXFP8_SCALE_WORDS = gl.constexpr(_MXFP8.data // 4), gl.constexpr(_MXFP8.scale // 4)
NVFP4_WORDS, NVFP4_SCALE_WORDS = gl.constexpr(_NVFP4.data // 4), gl.constexpr(_NVFP4.scale // 4)
CHUNKS = gl.constexpr(8)  # of a row, 64 channels each
MX_TILE_WORDS = gl.constexpr(layout.MX_TILE // 4)
UE8M0_BIAS = gl.constexpr(layout.UE8M0_BIAS)
NAN_BYTE = gl.constexpr(255)
EXPONENT = gl.constexpr(120)  # difference of the exponent biases of bfloat16 and e4m3
LAST_BYTE = gl.constexpr(134)  # UE8M0 of 2^7, the largest scale whose factor is a bfloat16
BOTH = gl.constexpr(0x00800080)  # exponent 1 of a bfloat16, in both halves of a word
HALVES = gl.constexpr(0x00010001)
NAN_HALF = gl.constexpr(0x7FC0)


class KeyIndices(NamedTuple):
    """A cache and the index rows of all tokens.

    Attributes:
        p_words: the cache as int32. page_chunks: stride of pages in units of 16 bytes. log_page: log2 of its tokens.
        p_indices, stride: `[T, n]` and the stride of its rows.
        length, capacity: valid columns of this token, and slots of the cache.
    """

    p_words: Any
    page_chunks: Any
    log_page: Any
    p_indices: Any
    stride: Any
    length: Any
    capacity: Any


class KeyRow(NamedTuple):
    """A cache and the index row of one token; the other fields as in `KeyIndices`."""

    p_words: Any
    page_chunks: Any
    p_row: Any
    length: Any
    capacity: Any
    log_page: Any


class KeyAddresses(NamedTuple):
    """Addresses of a program's keys in shared memory.

    Attributes:
        rows, scales: int64 `[places, keys of a block]`, see `address_of`. Block j of the program has place j % places.
        lives: float32 likewise, 1 for keys and 0 for invalid slots.
        placed: barrier of the first three blocks. Each later block is there when the block three before it is freed.
    """

    rows: Any
    scales: Any
    lives: Any
    placed: Any


@gluon.jit
def _scaled_codes(codes, factor):
    """Return two words of scaled bfloat16 pairs for the four e4m3 codes in each int32.

    `factor` is a bfloat16, twice in a word. The instruction that moves a code spreads its sign over the byte above it;
    a shift and a mask leave the bfloat16.
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
def _code_pairs(codes):
    """Return four words of bfloat16 pairs, the values times 2^-126, for the eight e2m1 codes in each int32.

    Even and odd codes become bytes of a sign and three low bits. A word takes one of each, twice: the upper copy gives
    the sign, the lower one, shifted, the exponent and the mantissa.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd, sign, x, y;
        shl.b32 sign, $4, 4;
        and.b32 sign, sign, 0x80808080;
        and.b32 even, $4, 0x07070707;
        or.b32 even, even, sign;
        and.b32 sign, $4, 0x80808080;
        shr.u32 odd, $4, 4;
        and.b32 odd, odd, 0x07070707;
        or.b32 odd, odd, sign;
        prmt.b32 x, even, odd, 0x4400;
        shl.b32 y, x, 6;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x01c001c0;
        or.b32 $0, x, y;
        prmt.b32 x, even, odd, 0x5511;
        shl.b32 y, x, 6;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x01c001c0;
        or.b32 $1, x, y;
        prmt.b32 x, even, odd, 0x6622;
        shl.b32 y, x, 6;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x01c001c0;
        or.b32 $2, x, y;
        prmt.b32 x, even, odd, 0x7733;
        shl.b32 y, x, 6;
        and.b32 x, x, 0x80008000;
        and.b32 y, y, 0x01c001c0;
        or.b32 $3, x, y;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _times_power_of_two(pairs, POWER: gl.constexpr):
    """Multiply words of bfloat16 pairs by 2^POWER."""
    factor = gl.full(pairs.shape, (POWER + UE8M0_BIAS) * BOTH, gl.int32, pairs.type.layout)
    return _times(pairs, factor)


@gluon.jit
def row_length(p_lens, stride, token, width, CACHE: gl.constexpr = CACHED):
    """Load the number of valid columns of a token's row of indices, int32: all of them if `p_lens` is None."""
    length = width
    if p_lens is not None:
        length = gl.load(p_lens + token * stride, cache_modifier=CACHE)
        length = gl.minimum(gl.maximum(length, 0), width).to(gl.int32)
    return length


@gluon.jit
def address_of(slot, page_chunks, log_page, PLAIN: gl.constexpr = False):
    """Return where the keys `slot` are: int64 first words of their rows, int64 numbers of their scales.

    Invalid slots get the address of the first key. page_chunks: stride of pages in units of 16 bytes. PLAIN rows have
    no scales, and their first word in place of a number.
    """
    safe = gl.where(slot >= 0, slot, 0)
    page = (safe >> log_page).to(gl.int64)
    size = 1 << log_page
    offset = safe & (size - 1)
    if PLAIN:
        row = page * (page_chunks * 4) + offset * HALF
        scale = row
    else:
        row = page * (page_chunks * 4) + offset * ROW_WORDS
        scale = page * (page_chunks * 2) + (size * SCALES_PER_ROW + offset)
    return row, scale


@gluon.jit
def grid_address_of(slot, page_chunks, log_page, is_mxfp8):
    """Return where the keys `slot` of GRIDS are: int64 first words of their rows, and of their scales.

    Invalid slots get the address of the first key. page_chunks: stride of pages in units of 16 bytes.
    """
    safe = gl.where(slot >= 0, slot, 0)
    p_page = (safe >> log_page).to(gl.int64) * (page_chunks * 4)
    size = 1 << log_page
    offset = safe & (size - 1)
    words = gl.where(is_mxfp8, MXFP8_WORDS, NVFP4_WORDS)
    scale_words = gl.where(is_mxfp8, MXFP8_SCALE_WORDS, NVFP4_SCALE_WORDS)
    return p_page + offset * words, p_page + (size * words + offset * scale_words)


@gluon.jit
def copy_rows(words, p_words, row, live, COPIES: gl.constexpr = COPIES):
    """Start to copy bfloat16 rows at an `address_of` `[N]` to `words` `[N, 256]`, shared; zeros where not `live`."""
    o_word = gl.expand_dims(gl.arange(0, LINE_WORDS, gl.SliceLayout(0, COPIES)), 0)
    p_line = p_words + (gl.expand_dims(row, 1) + o_word)
    m_line, _ = gl.broadcast(gl.expand_dims(live, 1), p_line)
    for line in gl.static_range(HALF // LINE_WORDS):
        tile = words.slice(line * LINE_WORDS, LINE_WORDS, 1)
        copy_elements(tile, p_line + line * LINE_WORDS, mask=m_line)


@gluon.jit
def announce_copies(ready):
    """Let a barrier complete when the copies that the threads of a partition have started have landed.

    The barrier counts an arrival of each thread, and one more for the stores of all threads.
    """
    async_copy.mbarrier_arrive(ready, increment_count=False)
    thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def fetch_keys(
    p_words, page_chunks, slot, log_page,
    WORDS: gl.constexpr = WORDS, ROPES: gl.constexpr = ROPES, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """Load the keys `slot` `[N]`, -1 for invalid slots, as `fetch_rows` returns them."""
    row, scale = address_of(slot, page_chunks, log_page)
    return fetch_rows(p_words, row, scale, slot >= 0, WORDS, ROPES, CACHE)


@gluon.jit
def fetch_rows(
    p_words, row, scale, live,
    WORDS: gl.constexpr = WORDS, ROPES: gl.constexpr = ROPES, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """Load keys at an `address_of` `[N]`: words of codes `[N, 8, 16]`, words of rope `[N, 32]`, and scales `[N]`.

    The last tile of codes is empty. Where not `live`, the rope is zero and the rest is the first key's. Codes are
    finite whatever their bits are, so that a factor of zero clears them, and no register is zeroed before a load.
    """
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, TILES + 1, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0), 2)
    o_word = gl.expand_dims(gl.expand_dims(gl.arange(0, TILE_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, WORDS))), 0), 1)
    p_codes = p_words + (gl.expand_dims(gl.expand_dims(row, 1), 2) + o_word)
    codes = gl.load(p_codes + tile * TILE_WORDS, mask=tile < TILES, other=0, cache_modifier=CACHE)
    rope_row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, ROPES)), 1)
    m_rope = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, ROPES)), 1)
    o_rope = gl.expand_dims(gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, ROPES)), 0)
    rope = gl.load(p_words + (rope_row + o_rope + ROPE_WORD), mask=m_rope, other=0, cache_modifier=CACHE)
    # The scales of a key are one int64: unpacking a vector of bytes would wait for the load here.
    p_scales = p_words.to(gl.pointer_type(gl.int64), bitcast=True)
    return codes, rope, gl.load(p_scales + scale, cache_modifier=CACHE)


@gluon.jit
def dequantize_keys(codes, rope, scales, live, WORDS: gl.constexpr = WORDS):
    """Convert the codes and scales that `fetch_rows` loaded to words of bfloat16 pairs `[N, 256]`."""
    tile = gl.expand_dims(gl.arange(0, TILES + 1, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0)
    byte = (gl.expand_dims(scales, 1) >> (tile * 8).to(gl.int64)).to(gl.int32) & 255
    both = gl.expand_dims(gl.where(live, BOTH, 0), 1)
    factor = (gl.minimum(byte, LAST_BYTE) + EXPONENT) * both
    factor, _ = gl.broadcast(gl.expand_dims(factor, 2), codes)
    low, high = _scaled_codes(codes, factor)
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
    """Multiply words of bfloat16 pairs by bfloat16 factors, each twice in a word."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, factor], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _fetch_part(p_window_words, p_extra_words, boundary, block, place, addresses, PART: gl.constexpr):
    """Load keys PART * FETCH and on of a block as `fetch_rows` returns them, and which of them are valid."""
    row = addresses.rows.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    scale = addresses.scales.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    live = addresses.lives.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS) > 0
    # The compiler cannot know the alignment of values in shared memory.
    row = gl.multiple_of(row, ROW_ALIGN)
    codes, rope, words = fetch_rows(gl.where(block < boundary, p_window_words, p_extra_words), row, scale, live)
    return codes, rope, words, live


@gluon.jit
def produce_keys(p_window_words, p_extra_words, span, end, addresses, ring):
    """Run the producer warpgroup: dequantise a token's keys, to before block `end`, into a ring of buffers.

    Args:
        p_window_words, p_extra_words: the caches as int32.
        span: first block of the extra cache, and first block of the program.
        ring: keys bfloat16 `[buffers, keys of a block, 512]`, shared, and the barriers `ready` and `free` of buffers.
    """
    boundary, begin = span
    keys, ready, free = ring
    BUFFERS: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    PARTS: gl.constexpr = BLOCK_N // FETCH
    PLACES: gl.constexpr = addresses.rows.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, HALF], SWIZZLED_WORDS)
    if end > begin:
        mbarrier.wait(addresses.placed, 0)
        codes, rope, numbers, live = _fetch_part(p_window_words, p_extra_words, boundary, begin, 0, addresses, 0)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            for part in gl.static_range(PARTS):
                now_codes, now_rope, now_numbers, now_live = codes, rope, numbers, live
                # The loads of the next keys are in flight while these are dequantised.
                following = (part + 1) // PARTS
                codes, rope, numbers, live = _fetch_part(
                    p_window_words, p_extra_words, boundary, block + following, (number + following) % PLACES,
                    addresses, (part + 1) % PARTS,
                )  # fmt: skip
                pairs = dequantize_keys(now_codes, now_rope, now_numbers, now_live)
                if part == 0:
                    mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
                words.index(buffer).slice(part * FETCH, FETCH, 0).store(pairs)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)


@gluon.jit
def _fetch_grid(p_words, place, addresses, PART: gl.constexpr, WORDS: gl.constexpr, COUNT: gl.constexpr):
    """Load keys PART * FETCH and on of a block, and which of them are valid.

    Returns:
        Words of codes `[N, 8, COUNT]`, scales `[N, 8]` of a chunk of 64 channels each, and bool `[N]`.
    """
    SLOTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))
    row = addresses.rows.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    scale = addresses.scales.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS)
    live = addresses.lives.index(place).slice(PART * FETCH, FETCH, 0).load(SLOTS) > 0
    # The compiler cannot know the alignment of values in shared memory.
    row, scale = gl.multiple_of(row, ROW_ALIGN), gl.multiple_of(scale, ROW_ALIGN)
    o_chunk = gl.expand_dims(gl.arange(0, CHUNKS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), 0)
    o_word = gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, WORDS))), 0), 1)
    p_codes = p_words + (gl.expand_dims(gl.expand_dims(row, 1), 2) + o_word)
    codes = gl.load(p_codes + gl.expand_dims(o_chunk, 2) * COUNT)
    # Two bytes of mxfp8 or four of nvfp4 scale a chunk.
    SCALE: gl.constexpr = gl.int16 if COUNT * CHUNKS == MXFP8_WORDS else gl.int32
    PER_WORD: gl.constexpr = 2 if COUNT * CHUNKS == MXFP8_WORDS else 1
    p_scale = p_words.to(gl.pointer_type(SCALE), bitcast=True) + gl.expand_dims(scale, 1) * PER_WORD
    return codes, gl.load(p_scale + o_chunk).to(gl.int32), live


@gluon.jit
def _dequantize_mxfp8(codes, scales, live):
    """Convert what `_fetch_grid` loaded to words of bfloat16 pairs `[N, 256]`, zeros where not `live`."""
    o_word = gl.arange(0, codes.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    o_tile = gl.expand_dims(gl.expand_dims(o_word // MX_TILE_WORDS, 0), 1)
    byte = (gl.expand_dims(scales, 2) >> (o_tile * 8)) & 255
    both = gl.expand_dims(gl.expand_dims(gl.where(live, BOTH, 0), 1), 2)
    low, high = _scaled_codes(codes, (gl.minimum(byte, LAST_BYTE) + EXPONENT) * both)
    # Of NaN is the exponent of infinity: it makes NaN or infinity of values, and NaN of the outputs.
    last = gl.where((byte == NAN_BYTE) & (both != 0), NAN_BYTE, gl.maximum(byte, LAST_BYTE) + (UE8M0_BIAS - LAST_BYTE))
    rest = last * BOTH
    low, high = _times(low, rest), _times(high, rest)
    return gl.reshape(gl.join(low, high), [codes.shape[0], HALF])


@gluon.jit
def _dequantize_nvfp4(codes, scales, live):
    """Convert what `_fetch_grid` loaded to words of bfloat16 pairs `[N, 256]`, zeros where not `live`."""
    o_word = gl.arange(0, codes.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, NIBBLES)))
    o_tile = gl.expand_dims(gl.expand_dims(o_word // 2, 0), 1)
    byte = (gl.expand_dims(scales, 2) >> (o_tile * 8)) & 255
    magnitude = byte & 0x7F
    # An e4m3 code as a bfloat16 that is 2^-120 times its value
    half = gl.where(magnitude == 0x7F, NAN_HALF, ((byte & 0x80) << 8) | (magnitude << 4))
    half = gl.where(gl.expand_dims(gl.expand_dims(live, 1), 2), half, 0)
    factor = _times_power_of_two(half * HALVES, EXPONENT)
    pairs0, pairs1, pairs2, pairs3 = _code_pairs(codes)
    pairs0 = _times(_times_power_of_two(pairs0, UE8M0_BIAS - 1), factor)
    pairs1 = _times(_times_power_of_two(pairs1, UE8M0_BIAS - 1), factor)
    pairs2 = _times(_times_power_of_two(pairs2, UE8M0_BIAS - 1), factor)
    pairs3 = _times(_times_power_of_two(pairs3, UE8M0_BIAS - 1), factor)
    pairs = gl.join(gl.join(pairs0, pairs2), gl.join(pairs1, pairs3))
    return gl.reshape(pairs, [codes.shape[0], HALF])


@gluon.jit
def _produce_grid(p_words, span, begin, addresses, ring, MXFP8: gl.constexpr):
    """Dequantise the blocks `span` of one cache into the ring of a program whose first block is `begin`."""
    keys, ready, free = ring
    BUFFERS: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    PARTS: gl.constexpr = BLOCK_N // FETCH
    PLACES: gl.constexpr = addresses.rows.shape[0]
    TILE: gl.constexpr = WORDS if MXFP8 else NIBBLES
    COUNT: gl.constexpr = (MXFP8_WORDS if MXFP8 else NVFP4_WORDS) // CHUNKS
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, HALF], SWIZZLED_WORDS)
    first, end = span
    if end > first:
        codes, scales, live = _fetch_grid(p_words, (first - begin) % PLACES, addresses, 0, TILE, COUNT)
        for block in range(first, end):
            number = block - begin
            buffer = number % BUFFERS
            for part in gl.static_range(PARTS):
                now_codes, now_scales, now_live = codes, scales, live
                # The loads of the next keys are in flight while these are dequantised. After the last block they are
                # the same again: the next one belongs to the other cache.
                following = gl.minimum(number + (part + 1) // PARTS, end - begin - 1) % PLACES
                codes, scales, live = _fetch_grid(p_words, following, addresses, (part + 1) % PARTS, TILE, COUNT)
                if MXFP8:
                    pairs = _dequantize_mxfp8(now_codes, now_scales, now_live)
                else:
                    pairs = _dequantize_nvfp4(now_codes, now_scales, now_live)
                if part == 0:
                    mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
                words.index(buffer).slice(part * FETCH, FETCH, 0).store(pairs)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)


@gluon.jit
def produce_grid_keys(p_window_words, p_extra_words, span, end, addresses, ring):
    """Run the producer warpgroup for GRIDS, as `produce_keys` does: the window's blocks, then those of the entries."""
    boundary, begin = span
    if end > begin:
        mbarrier.wait(addresses.placed, 0)
        _produce_grid(p_window_words, (begin, gl.minimum(end, boundary)), begin, addresses, ring, True)
        _produce_grid(p_extra_words, (gl.maximum(begin, boundary), end), begin, addresses, ring, False)


@gluon.jit
def copy_keys(p_window_words, p_extra_words, span, end, addresses, ring):
    """Run the producer warpgroup for PLAIN keys: copy them into a ring of buffers, as `produce_keys` does."""
    boundary, begin = span
    keys, ready, free = ring
    BUFFERS: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    PLACES: gl.constexpr = addresses.rows.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, HALF], SWIZZLED_WORDS)
    if end > begin:
        mbarrier.wait(addresses.placed, 0)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            place = number % PLACES
            # The compiler cannot know the alignment of values in shared memory.
            row = gl.multiple_of(addresses.rows.index(place).load(COPIED), ROW_ALIGN)
            live = addresses.lives.index(place).load(COPIED) > 0
            p_words = gl.where(block < boundary, p_window_words, p_extra_words)
            mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
            copy_rows(words.index(buffer), p_words, row, live)
            announce_copies(ready.index(buffer))


@gluon.jit
def prefetch(pointers):
    """Prefetch what lies at `pointers` into L2. Nothing is read, so that it need not be written yet."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_grid_rows(p_words, row, scale, is_mxfp8):
    """Prefetch keys at a `grid_address_of`, as `prefetch_rows` does."""
    o_line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LINES)), 0)
    last = gl.where(is_mxfp8, MXFP8_WORDS, NVFP4_WORDS) - 1
    data = gl.expand_dims(row, 1) + gl.minimum(o_line * LINE_WORDS, last)
    prefetch(p_words + gl.where(o_line == 7, gl.expand_dims(scale, 1), data))


@gluon.jit
def prefetch_rows(p_words, row, scale, LINES: gl.constexpr, PLAIN: gl.constexpr = False):
    """Prefetch keys at an `address_of`: eight threads of a row of LINES take a line each, the last one the scales."""
    o_line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LINES)), 0)
    if PLAIN:
        prefetch(p_words + (gl.expand_dims(row, 1) + o_line * LINE_WORDS))
    else:
        data = gl.expand_dims(row, 1) + gl.minimum(o_line * LINE_WORDS, ROW_WORDS - 1)
        prefetch(p_words + gl.where(o_line == 7, gl.expand_dims(scale * SCALE_WORDS, 1), data))


@gluon.jit
def row_extents(p_lens, lens_strides, widths, token, BLOCK_N: gl.constexpr):
    """Return the lengths of a token's two index rows, the blocks of the first, and the blocks of both.

    `p_lens`, `lens_strides` and `widths` are pairs: of the window and of the extra cache.
    """
    window_length = row_length(p_lens[0], lens_strides[0], token, widths[0], ".cg")
    extra_length = row_length(p_lens[1], lens_strides[1], token, widths[1], ".cg")
    window_blocks = (window_length + BLOCK_N - 1) // BLOCK_N
    return window_length, extra_length, window_blocks, window_blocks + (extra_length + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def block_slots(window, extra, window_blocks, block, N: gl.constexpr, SLOTS: gl.constexpr):
    """Load int32 slots of a block of N keys, in layout SLOTS; -1 for invalid slots, and past the last block.

    `window` and `extra` are `KeyRow`.
    """
    inner = block < window_blocks
    column = (block - gl.where(inner, 0, window_blocks)) * N + gl.arange(0, N, SLOTS)
    live = column < gl.where(inner, window.length, extra.length)
    slot = gl.load(gl.where(inner, window.p_row, extra.p_row) + column, mask=live, other=-1, cache_modifier=".cg")
    return gl.where((slot >= 0) & (slot < gl.where(inner, window.capacity, extra.capacity)), slot, -1).to(gl.int32)


@gluon.jit
def load_slots(window, extra, token, boundary, block, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load int32 slots of N keys from the first of a block of BLOCK_N on; -1 for invalid slots, and past the last.

    `window` and `extra` are `KeyIndices`.
    """
    o_key = gl.arange(0, N, KEY)
    o_block = block + o_key // BLOCK_N
    first = o_block < boundary
    column = (o_block - gl.where(first, 0, boundary)) * BLOCK_N + o_key % BLOCK_N
    p_window_slot = window.p_indices + token * window.stride + column
    p_extra_slot = extra.p_indices + token * extra.stride + column
    # Indices may have 64 bits, and are compared before they are narrowed.
    window_slot = gl.load(p_window_slot, mask=first & (column < window.length), other=-1)
    extra_slot = gl.load(p_extra_slot, mask=(o_block >= boundary) & (column < extra.length), other=-1)
    window_slot = gl.where((window_slot >= 0) & (window_slot < window.capacity), window_slot, -1).to(gl.int32)
    extra_slot = gl.where((extra_slot >= 0) & (extra_slot < extra.capacity), extra_slot, -1).to(gl.int32)
    return gl.where(first, window_slot, extra_slot)


@gluon.jit
def store_addresses(
    window, extra, boundary, block, slot, place,
    BLOCK_N: gl.constexpr, PLAIN: gl.constexpr = False, GRIDS: gl.constexpr = False,
):  # fmt: skip
    """Store the addresses of keys `slot`, the first of them in `block`, to `place`: rows, scales and lives, shared."""
    first = block + gl.arange(0, slot.shape[0], KEY) // BLOCK_N < boundary
    chunks = gl.where(first, window.page_chunks, extra.page_chunks)
    log_page = gl.where(first, window.log_page, extra.log_page)
    if GRIDS:
        row, scale = grid_address_of(slot, chunks, log_page, first)
    else:
        row, scale = address_of(slot, chunks, log_page, PLAIN)
    place[0].store(row)
    if not PLAIN:
        place[1].store(scale)
    place[2].store(gl.where(slot >= 0, 1.0, 0.0))


@gluon.jit
def prefetch_block(
    window, extra, boundary, block, rows, scales, PLAIN: gl.constexpr = False, GRIDS: gl.constexpr = False
):
    """Prefetch the keys of a block from their stored addresses."""
    p_words = gl.where(block < boundary, window.p_words, extra.p_words)
    row = rows.load(LINE_KEY)
    if GRIDS:
        prefetch_grid_rows(p_words, row, scales.load(LINE_KEY), block < boundary)
    else:
        prefetch_rows(p_words, row, row if PLAIN else scales.load(LINE_KEY), LINES, PLAIN)
