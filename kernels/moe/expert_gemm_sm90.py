"""GEMM of weights with few tokens on Hopper: MXFP4 as e4m3 in registers, x as a sum of two e4m3.

e2m1 becomes e4m3 with half the instructions and registers that bfloat16 takes, and an MMA covers the 32 elements of K
that have one scale, which multiplies float32 sums, not weights. e4m3 weights are multiplied as they are. A row of x is
scaled by a power of two and split into a high and a low part, which hold the eight bits of bfloat16 and more; both are
columns of one operand. Products are exact; Hopper adds those of an e4m3 MMA with fewer bits than float32 has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import MX_TILE as _MX_TILE
from ..device.quant import MAGNITUDE, MANTISSA_BITS, NAN_BITS, ue8m0_scale
from .expert_gemm import WEIGHT_TILE, WORD_COLUMNS, unusual_scales
from .expert_operands import SplitRows

MX_TILE = tl.constexpr(_MX_TILE)
BLOCK_BYTES = tl.constexpr(64)  # of a row of MXFP4 whose scales are one word
NOT_FINITE = tl.constexpr(255)  # exponent of infinity and NaN
SMALLEST = tl.constexpr(8)  # lowest exponent of a row's largest element that is scaled fully
EXPONENTS = tl.constexpr(2 * 127 + 7)  # sum of the exponents of that element and of the factor that makes it 2^7
HALF_UNIT, HIGH_BITS = tl.constexpr(0x80000), tl.constexpr(-0x100000)  # of the three bits that e4m3 keeps of 23
SUBNORMALS = tl.constexpr(24576.0)  # its last bit, 2^-9, is that of e4m3's subnormals
LOW = tl.constexpr(32.0)  # a low part is at most 2^3
FACTOR_BITS = tl.constexpr(0x7F800000)
E2M1_UNIT = tl.constexpr(64.0)  # e2m1 among the lower bits of e4m3's exponent and mantissa is the value by 64
UNPACK = tl.constexpr(  # four lower nibbles and four upper ones; the outputs are written before the input's last use
    "{ .reg .b32 a, b; shl.b32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C; shl.b32 b, $2, 4; "
    "lop3.b32 $0, a, b, 0x80808080, 0xF8; "
    "shr.u32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C; lop3.b32 $1, a, $2, 0x80808080, 0xF8; }"
)


@triton.jit
def split_element(o):
    """Return which element of K position `o` of an unpacked row holds: 16 bytes' lower nibbles, then the upper ones."""
    return (o & -32) | ((o & 15) << 1) | ((o >> 4) & 1)


@triton.jit
def split_position(k):
    """Return at which position of an unpacked row element `k` is."""
    return (k & -32) | ((k & 1) << 4) | ((k >> 1) & 15)


@triton.jit
def split_e4m3(x, AXIS: tl.constexpr):
    """Return high and low parts, e4m3, and scales of float32 `x` with one scale along AXIS.

    x is scale * (high + low / LOW). The error is at most 2^-9 of an element, or 2^-22 of the largest one of its scale.
    Where one is not finite, the scale is NaN: e4m3 has no infinity.
    """
    exponent = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, AXIS) >> MANTISSA_BITS
    capped = tl.maximum(exponent, SMALLEST)
    factor = (-capped + EXPONENTS) << MANTISSA_BITS
    x *= tl.expand_dims(factor.to(tl.float32, bitcast=True), AXIS)
    scale = tl.where(exponent == NOT_FINITE, NAN_BITS, (capped - 7) << MANTISSA_BITS)
    # Rounded here: ptxas 12.8 loses what the conversion returns where it is used and stored, too.
    high = ((x.to(tl.int32, bitcast=True) + HALF_UNIT) & HIGH_BITS).to(tl.float32, bitcast=True)
    high = (high + SUBNORMALS) - SUBNORMALS
    low = (x - high) * LOW
    return high.to(tl.float8e4nv), low.to(tl.float8e4nv), scale.to(tl.float32, bitcast=True)


@triton.jit
def add_parts(acc, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Return [ROWS, TOKENS] of sums [ROWS, 2 * TOKENS] with the high parts, then with the low ones."""
    high, low = tl.split(tl.permute(tl.reshape(acc, [ROWS, 2, TOKENS]), (0, 2, 1)))
    return high + low * (1 / LOW)


@triton.jit
def unpack_e2m1(w, PTX: tl.constexpr):
    """Return e4m3 [ROWS, 32], 1 / E2M1_UNIT of the values of uint8 [ROWS, 16]."""
    if PTX:
        lower, upper = tl.inline_asm_elementwise(UNPACK, "=&r,=&r,r", [w], (tl.uint8, tl.uint8), is_pure=True, pack=4)
    else:
        lower = ((w << 2) & 0x1C) | ((w << 4) & 0x80)
        upper = ((w >> 2) & 0x1C) | (w & 0x80)
    w = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), [w.shape[0], MX_TILE])
    return w.to(tl.float8e4nv, bitcast=True)


@triton.jit
def scale_of_word(words, GROUP: tl.constexpr, ANY: tl.constexpr):
    """Return the float32 scales that are byte GROUP of int32 `words` [N]; without ANY, of normal numbers."""
    if ANY:
        factor = ue8m0_scale((words >> (8 * GROUP)) & 0xFF)
    elif GROUP == 3:
        factor = ((words >> 1) & FACTOR_BITS).to(tl.float32, bitcast=True)
    else:
        factor = ((words << (MANTISSA_BITS - 8 * GROUP)) & FACTOR_BITS).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def _add_block(acc, w, words, x, row_scale, SCALE_K: tl.constexpr, PTX: tl.constexpr, ANY: tl.constexpr):
    """Add the product of uint8 [ROWS, 64] and the first 128 elements of K of `SplitRows` x."""
    p_x, p_scale, mask = x
    even, odd = tl.split(tl.permute(tl.reshape(w, [w.shape[0], 2, 2, BLOCK_BYTES // 4]), (0, 3, 1, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    x0, x1 = tl.load(p_x, mask, 0.0), tl.load(p_x + MX_TILE, mask, 0.0)
    x2, x3 = tl.load(p_x + 2 * MX_TILE, mask, 0.0), tl.load(p_x + 3 * MX_TILE, mask, 0.0)
    factor0, factor1 = scale_of_word(words, 0, ANY)[:, None], scale_of_word(words, 1, ANY)[:, None]
    factor2, factor3 = scale_of_word(words, 2, ANY)[:, None], scale_of_word(words, 3, ANY)[:, None]
    scale0, scale1 = row_scale, row_scale
    if SCALE_K == 2 * MX_TILE:
        scale0, scale1 = tl.load(p_scale, mask, 0.0), tl.load(p_scale + 1, mask, 0.0)
    if ANY:
        # First the scale of x: the product of the other two may not be a float32.
        acc += tl.dot(unpack_e2m1(w0, PTX), x0) * scale0 * factor0
        acc += tl.dot(unpack_e2m1(w1, PTX), x1) * scale0 * factor1
        acc += tl.dot(unpack_e2m1(w2, PTX), x2) * scale1 * factor2
        acc += tl.dot(unpack_e2m1(w3, PTX), x3) * scale1 * factor3
    elif SCALE_K == 2 * MX_TILE:
        sums = tl.dot(unpack_e2m1(w0, PTX), x0) * factor0
        sums += tl.dot(unpack_e2m1(w1, PTX), x1) * factor1
        acc += sums * scale0
        sums = tl.dot(unpack_e2m1(w2, PTX), x2) * factor2
        sums += tl.dot(unpack_e2m1(w3, PTX), x3) * factor3
        acc += sums * scale1
    else:
        acc += tl.dot(unpack_e2m1(w0, PTX), x0) * factor0
        acc += tl.dot(unpack_e2m1(w1, PTX), x1) * factor1
        acc += tl.dot(unpack_e2m1(w2, PTX), x2) * factor2
        acc += tl.dot(unpack_e2m1(w3, PTX), x3) * factor3
    return acc


@triton.jit
def _multiply(
    rows, p_words, x, K: tl.constexpr, SCALE_K: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ANY: tl.constexpr,
):  # fmt: skip
    """Return the sums of both parts, and bits that are not 0 where a scale is no usual one."""
    weight, _, expert, first, _ = rows
    p_x, p_scale, mask = x
    ROWS: tl.constexpr = TILE.rows
    BLOCK_K: tl.constexpr = TILE.block_k
    PTX: tl.constexpr = TILE.ptx
    acc = tl.zeros((ROWS, p_x.shape[1]), tl.float32)
    found = tl.zeros((ROWS,), tl.int32)
    row_scale = tl.load(p_scale, mask, 0.0)
    STEP: tl.constexpr = WORD_COLUMNS // SCALE_K
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = weight.load([expert, 0, first, k // 2])
        words = tl.load(p_words + k // WORD_COLUMNS)
        p_scales = p_scale + k // WORD_COLUMNS * STEP
        if BLOCK_K == 2 * WORD_COLUMNS:
            w0, w1 = tl.split(tl.permute(tl.reshape(w, [ROWS, 2, BLOCK_BYTES]), (0, 2, 1)))
            words0, words1 = tl.split(words)
            found |= unusual_scales(words0) | unusual_scales(words1)
            x0 = SplitRows(p_x + k, p_scales, mask)
            acc = _add_block(acc, w0, words0, x0, row_scale, SCALE_K, PTX, ANY)
            x1 = SplitRows(p_x + (k + WORD_COLUMNS), p_scales + STEP, mask)
            acc = _add_block(acc, w1, words1, x1, row_scale, SCALE_K, PTX, ANY)
        else:
            words0 = tl.reshape(words, [ROWS])
            found |= unusual_scales(words0)
            w0 = tl.reshape(w, [ROWS, BLOCK_BYTES])
            acc = _add_block(acc, w0, words0, SplitRows(p_x + k, p_scales, mask), row_scale, SCALE_K, PTX, ANY)
    if not ANY and SCALE_K == K:
        acc *= row_scale
    return acc, found


@triton.jit
def multiply_mxfp4(
    rows,  # `WeightRows`, a descriptor of uint8 [E, HALVES, N / HALVES, K / 2] with a box of BLOCK_K / 2 bytes
    x,  # `SplitRows`
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_K: tl.constexpr,  # elements of K that share a scale of x, 64 or K
    TILE: tl.constexpr,  # `GemmTile`
):
    """Return float32 [ROWS, TOKENS] of rows of an expert's MXFP4 weight with rows of x in the order of unpacked rows.

    Scales that are not the usual ones, which no trained weight has, cost the tile a second pass.
    """
    _, p_words, expert, _, o_row = rows
    WORDS: tl.constexpr = K // WORD_COLUMNS
    o_word = tl.arange(0, TILE.block_k // WORD_COLUMNS)
    p_words += expert.to(tl.int64) * (N * WORDS) + o_row[:, None] * WORDS + o_word[None, :]
    x = SplitRows(x.p_x[None, :] + tl.arange(0, MX_TILE)[:, None], x.p_scale[None, :], x.mask[None, :])
    acc, found = _multiply(rows, p_words, x, K, SCALE_K, TILE, TILE.stages, False)
    if tl.max((found != 0).to(tl.int32), 0) != 0:
        acc, found = _multiply(rows, p_words, x, K, SCALE_K, TILE, 1, True)
    return add_parts(acc, TILE.rows, TILE.tokens) * E2M1_UNIT


@triton.jit
def multiply_e4m3(
    rows,  # `WeightRows`, a descriptor of e4m3 [1, HALVES, N / HALVES, K] with a box of BLOCK_K columns
    x,  # `SplitRows`
    K: tl.constexpr,
    SCALE_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return float32 [ROWS, TOKENS] of rows of an e4m3 weight with rows of x; what is not said is as in MXFP4's."""
    weight, p_weight_scale, _, first, o_row = rows
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    BLOCK_K: tl.constexpr = TILE.block_k
    STAGES: tl.constexpr = TILE.stages
    acc = tl.zeros((ROWS, 2 * TOKENS), tl.float32)
    p_x = x.p_x[None, :] + tl.arange(0, BLOCK_K)[:, None]
    p_scale, mask = x.p_scale[None, :], x.mask[None, :]
    p_weight_scale += o_row // WEIGHT_TILE * tl.cdiv(K, WEIGHT_TILE)
    row_scale = tl.load(p_scale, mask, 0.0)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = tl.load(p_x + k, mask, 0.0)
        w = tl.reshape(weight.load([0, 0, first, k]), [ROWS, BLOCK_K])
        factor = tl.load(p_weight_scale + k // WEIGHT_TILE)
        if factor.dtype == tl.uint8:
            factor = ue8m0_scale(factor.to(tl.int32))
        sums = tl.dot(w, values)
        if SCALE_K == K:
            acc += sums * factor[:, None]
        else:
            acc += sums * tl.load(p_scale + k // SCALE_K, mask, 0.0) * factor[:, None]
    if SCALE_K == K:
        acc *= row_scale
    return add_parts(acc, ROWS, TOKENS)
