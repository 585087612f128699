"""Scales in a Hopper product of few e4m3 tokens: how a program has those of all its strips, and sums take them.

How a weight comes on Hopper, a few strips at a time, while kernels in front have something to load themselves.

What all programs ask for at once waits for memory, and every load that comes after it waits behind it: for V4-Flash's
wq_b, which starts while the product of hidden and the insert still run, those of their weights, tokens and scales.

How a Hopper program quantises the strips of x that it multiplies, into shared memory, where the matrix unit reads.

An element of bfloat16 takes 4.5 instructions, where one by one, as float32, it took 7: both halves of a word share an
instruction until they are converted, and a register. So 16 loads of a thread are on their way before one is waited for,
where the registers of float32 had made the last two wait for the first, and of 32 nearly all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, scheduling_fence, thread_barrier
from ..hopper.quant import (
    ACT_AMAX_FLOOR_BITS,
    FP8_MAX,
    MANTISSA,
    MANTISSA_BITS,
    SUBNORMAL_HALF,
    UE8M0_BIAS,
    UE8M0_MAX_BYTE,
    quantised,
    scale_value,
)
from ..hopper.tma import copy_tile

WORD = gl.constexpr(layout.SCALES_PER_WORD)
WEIGHT_TILE = gl.constexpr(layout.WEIGHT_TILE)


@gluon.jit
def scales_of_weight(
    p_scale, row_stride, strip_stride, first_row, block, rows, begin, count, ONE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """float32 `[EACH, 1 or BLOCK_N]` of float32, or of UE8M0 bytes: of a block of the rows that start at `first_row`.

    What lies past the end repeats the last strip and row.
    """
    WIDE: gl.constexpr = 1 if ONE_SCALE else BLOCK_N
    LANES: gl.constexpr = 1 if ONE_SCALE else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    strip = begin + gl.minimum(gl.arange(0, EACH, gl.SliceLayout(1, SCALES)), count - 1)
    o_n = gl.arange(0, WIDE, gl.SliceLayout(0, SCALES))
    row = first_row + gl.minimum(block * BLOCK_N + o_n, rows - 1)
    p_scale += gl.expand_dims(row // WEIGHT_TILE * row_stride, 0)
    p_scale += gl.expand_dims(strip * strip_stride, 1)
    scale = gl.load(p_scale)
    if p_scale.dtype.element_ty == gl.uint8:
        scale = scale_value(scale.to(gl.int32))
    return scale


@gluon.jit
def scales_of_x(
    p_scale, token_stride, strip_stride, tokens, first_token, begin, count, BLOCK_M: gl.constexpr, EACH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """float32 `[EACH, BLOCK_M]` of a program's strips. What lies past the end repeats the last strip and token."""
    TOKENS: gl.constexpr = BLOCK_M if BLOCK_M < 32 else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TOKENS, TOKENS], [WARPS, 1], [1, 0])
    token = gl.minimum(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCALES)), tokens - 1).to(gl.int64)
    strip = begin + gl.minimum(gl.arange(0, EACH, gl.SliceLayout(1, SCALES)), count - 1)
    p_scale += gl.expand_dims(token * token_stride, 0)
    if p_scale.dtype.element_ty == gl.int32:
        # Words hold the UE8M0 bytes of four strips.
        words = gl.load(p_scale + gl.expand_dims(strip // WORD * strip_stride, 1))
        known = scale_value((words >> gl.expand_dims(8 * (strip % WORD), 1)) & 255)
    else:
        known = gl.load(p_scale + gl.expand_dims(strip * strip_stride, 1))
    return known


@gluon.jit
def put_rows(x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """float32 `[ROWS, WIDTH]` in shared memory, where each row can be asked for."""
    flat = gl.allocate_shared_memory(gl.float32, [ROWS * WIDTH], FLAT)
    flat.store(gl.reshape(x, [ROWS * WIDTH]))
    return reinterpret(flat, gl.float32, [ROWS, WIDTH], FLAT)


@gluon.jit
def add_scaled(acc, products, x_scales, w_scales, first, count, TURN: gl.constexpr):
    """`acc` and the products of the TURN strips from `first` on, as each is done; of those behind the last, nothing."""
    ACC: gl.constexpr = acc.type.layout
    for ahead in gl.static_range(TURN):
        strip = gl.minimum(first + ahead, count - 1)
        x_scale = x_scales.index(strip).load(gl.SliceLayout(0, ACC))
        row_scale = w_scales.index(strip).load(gl.SliceLayout(1, ACC))
        if TURN > 1:
            x_scale = gl.where(first + ahead < count, x_scale, 0.0)
            row_scale = gl.where(first + ahead < count, row_scale, 0.0)
        product = warpgroup_mma_wait(TURN - 1 - ahead, deps=[products[ahead]])
        acc += product * (gl.expand_dims(x_scale, 0) * gl.expand_dims(row_scale, 1))
    return acc


STRIP = gl.constexpr(layout.ACT_TILE)


@gluon.jit
def bring_paced(weights, w_ring, row, begin, filled, PACE: gl.constexpr):
    """Bring the first `filled` strips from `begin` on, PACE at a time, and return barriers for `await_paced`."""
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    pace = gl.allocate_shared_memory(gl.int64, [PACE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PACE):
        mbarrier.init(pace.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    for i in range(filled):
        own = pace.index(i % PACE)
        if i >= PACE:
            mbarrier.wait(own, (i // PACE - 1) & 1)
        mbarrier.expect(own, BLOCK_N * STRIP)
        copy_tile(weights, [row, (begin + i) * BLOCK_K], own, w_ring.index(i))
    return pace


@gluon.jit
def await_paced(pace, filled, PACE: gl.constexpr):
    """Wait for the last PACE strips; those before them are there."""
    for i in gl.static_range(PACE):
        last = filled - 1 - i
        if last >= 0:
            mbarrier.wait(pace.index(last % PACE), (last // PACE) & 1)


STRIP = gl.constexpr(layout.ACT_TILE)
WORD_ALIGN = gl.constexpr(4)  # words in what rows start at multiples of
MOST_TOKENS_AHEAD = gl.constexpr(16)
"""Of a tile whose loads all start before one is waited for. On an H200 one token of wq_b and wo_b takes 0.3 us less so,
and 32 tokens of wq_a and wkv beside HCA's rows 0.4 more. Larger ones store nothing before all loads have started: 32
of wq_a and wkv beside CSA's rows take 10.5 us instead of 11.5 out of memory, and a layer of them 1.5 less."""
MAGNITUDES = gl.constexpr(0x7FFF7FFF)  # of a pair
HALF_BITS = gl.constexpr(16)
TILE_OF_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""The bytes of a tile of e4m3, two to an element."""


@gluon.jit
def _larger(a, b):
    """Of either half of words, without a sign."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _e4m3_of_pairs(pairs, factor):
    """Pairs of e4m3, int16, of pairs of bfloat16 times factors, each of them twice in a word."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, low, high;
        .reg .b16 c, d;
        mul.rn.bf16x2 a, $1, $3;
        mul.rn.bf16x2 b, $2, $4;
        shl.b32 low, a, 16;
        and.b32 high, a, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 c, high, low;
        shl.b32 low, b, 16;
        and.b32 high, b, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 d, high, low;
        mov.b32 $0, {c, d};
        }""",
        "=r,r,r,r,r",
        [pairs, factor],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def quantised_pairs(pairs):
    """As `quantised` of strips of bfloat16 along axis 1, the same bits: int32 `[R, 64]`, and int16 of pairs of e4m3.

    The factor is a power of two, so that products have the bits of x, but for those that are nearer to zero than to any
    other e4m3.
    """
    largest = gl.reduce(pairs & MAGNITUDES, 1, _larger)
    # What is beside the larger half is cut off.
    largest = gl.maximum(largest << HALF_BITS, largest) >> HALF_BITS << HALF_BITS
    amax = gl.maximum(largest, ACT_AMAX_FLOOR_BITS).to(gl.float32, bitcast=True)
    bits = (amax * (1.0 / FP8_MAX)).to(gl.int32, bitcast=True)
    # Rounded up to a power of two: never zero or subnormal, as the floor is not.
    scale = (gl.minimum(bits, UE8M0_MAX_BYTE << MANTISSA_BITS) + MANTISSA) & ~MANTISSA
    inverse = gl.maximum((2 * UE8M0_BIAS << MANTISSA_BITS) - scale, SUBNORMAL_HALF)
    twice = (inverse >> HALF_BITS) * ((1 << HALF_BITS) + 1)
    pairs, twice = gl.broadcast(pairs, gl.expand_dims(twice, 1))
    return _e4m3_of_pairs(pairs, twice), scale.to(gl.float32, bitcast=True)


@gluon.jit
def quantise_strips(
    p_x, x_stride, tokens, first_token, begin, count, size, values, scales,
    BLOCK_M: gl.constexpr, AT_ONCE: gl.constexpr, RAGGED: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """A program's strips of x into `values` `[n, AT_ONCE * BLOCK_M, 128]` and `scales`, AT_ONCE at a time.

    What lies past the end repeats the last token and the last strip.
    """
    PAIRS: gl.constexpr = p_x.dtype.element_ty == gl.bfloat16
    WORDS: gl.constexpr = STRIP // 2 if PAIRS else STRIP  # of a strip
    o_row = gl.arange(0, AT_ONCE * BLOCK_M, gl.SliceLayout(1, X))
    o_k = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, X)), 0)
    token = gl.minimum(first_token + o_row % BLOCK_M, tokens - 1).to(gl.int64)
    APART: gl.constexpr = WORD_ALIGN if p_x.dtype.element_ty == gl.float32 else 2 * WORD_ALIGN
    p_token = p_x + gl.expand_dims(token * gl.multiple_of(x_stride, APART), 1)
    if PAIRS:
        p_token = p_token.to(gl.pointer_type(gl.int32), bitcast=True)
    # In a loop, even of one turn, the first load would wait for all that are on their way when it begins.
    for chunk in range(1 if values.shape[0] == 1 else (count + AT_ONCE - 1) // AT_ONCE):
        strip = begin + gl.minimum(chunk * AT_ONCE + o_row // BLOCK_M, count - 1)
        column = gl.expand_dims(strip * WORDS, 1) + o_k
        if RAGGED:
            x = gl.load(p_token + column, mask=column < size // (STRIP // WORDS), other=0)
        else:
            x = gl.load(p_token + column)
        if BLOCK_M <= MOST_TOKENS_AHEAD:
            scheduling_fence(tokens)
        if PAIRS:
            codes, scale = quantised_pairs(x)
            if BLOCK_M > MOST_TOKENS_AHEAD:
                # No store in front of a load: the assembler mixes them, and the last loads wait for the first.
                thread_barrier()
            reinterpret(values.index(chunk), gl.int16, [AT_ONCE * BLOCK_M, WORDS], TILE_OF_PAIRS).store(codes)
        else:
            codes, scale = quantised(x.to(gl.float32), 1)
            values.index(chunk).store(codes)
        scales.index(chunk).store(scale)
    # The matrix unit reads through the asynchronous proxy, behind a barrier, what this stored through the other.
    fence_async_shared()
