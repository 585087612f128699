"""GEMM of a tile of an expert's rows with a tile of tokens, in four weight formats.

The weight is the first operand of the MMA, [rows, K] x [K, tokens]: its rows fill a tensor core however few tokens an
expert has. MXFP4 is unpacked to bfloat16 in registers, in the order of wgmma's first operand,
so that no unpacked weight goes through shared memory (reference/moe/expert_weights.py). e4m3 is widened; its scale
multiplies the float32 sum of a block of 128 elements of K, or the weights, for many tokens and scales of powers of two.
e4m3 in blocks of 32x32 is multiplied by its scales in registers, which is exact in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import MX_TILE as _MX_TILE
from ...layout import WEIGHT_TILE as _WEIGHT_TILE
from ..device.mx_values import scaled_blocks
from ..device.quant import ue8m0_scale

MX_TILE, WEIGHT_TILE = tl.constexpr(_MX_TILE), tl.constexpr(_WEIGHT_TILE)
NIBBLES = tl.constexpr(8)  # e2m1 in a 32-bit word
WORD_COLUMNS = tl.constexpr(128)  # elements of K with four scales, one word
FEW_TOKENS = tl.constexpr(64)  # of a tile, up to which sums of a block are multiplied by its scale, not weights
USUAL_FIRST = tl.constexpr(16)  # byte of the smallest scale, 2^-111, that one multiplication can apply
USUAL = tl.constexpr(65536.0)  # what such weights lack: one multiplication by scale and 2^126 would exceed bfloat16
MULTIPLY_USUAL = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
MULTIPLY_ANY = tl.constexpr(  # the constant is hoisted out of the loop
    "{ .reg .b32 one, value; mov.b32 one, 0x7E807E80; mul.rn.bf16x2 value, $1, one; mul.rn.bf16x2 $0, value, $2; }"
)


@triton.jit
def unpacked_element(o):
    """Return which element of K, in the order of a checkpoint, position `o` of an unpacked row holds."""
    return (o & -32) | ((o & 7) << 2) | ((o >> 2) & 2) | ((o >> 4) & 1)


@triton.jit
def unpacked_position(k):
    """Return at which position of an unpacked row, in the order of a checkpoint, element `k` is."""
    return (k & -32) | ((k & 1) << 4) | ((k & 2) << 2) | ((k >> 2) & 7)


@triton.jit
def _pairs(words, MULTIPLY: tl.constexpr):
    """Return pairs of bfloat16 of the nibbles of int32 words in two new axes, each value times 2^-126.

    The sign is bit 15 and the rest are bits 8 to 6, subnormals included. With MULTIPLY one multiplication shifts both.
    """
    if MULTIPLY:
        upper = words >> 8
        pair0 = ((words & 0x000F000F) * 0x1040) & -0x7E3F7E40
        pair1 = ((words & 0x00F000F0) * 0x0104) & -0x7E3F7E40
        pair2 = ((upper & 0x000F000F) * 0x1040) & -0x7E3F7E40
        pair3 = ((upper & 0x00F000F0) * 0x0104) & -0x7E3F7E40
    else:
        pair0 = ((words << 12) & -0x7FFF8000) | ((words << 6) & 0x01C001C0)
        pair1 = ((words << 8) & -0x7FFF8000) | ((words << 2) & 0x01C001C0)
        pair2 = ((words << 4) & -0x7FFF8000) | ((words >> 2) & 0x01C001C0)
        pair3 = (words & -0x7FFF8000) | ((words >> 6) & 0x01C001C0)
    return tl.join(tl.join(pair0, pair2), tl.join(pair1, pair3))


@triton.jit
def unpack_mxfp4(words, scales, TILE: tl.constexpr, ANY: tl.constexpr):
    """Return bfloat16 [ROWS, BLOCK_K] of int32 words [ROWS, BLOCK_K / 8] and int32 UE8M0 bytes [ROWS, BLOCK_K / 32].

    With ANY the pairs are multiplied by 2^126 and then by the scale, each exact; at once both would exceed bfloat16's
    exponent. A scale of 2^-127 is subnormal, and byte 255 is NaN. Without ANY the scales are usual ones, and the result
    is that by 1 / USUAL, of one multiplication.
    """
    ROWS: tl.constexpr = TILE.rows
    BLOCK_K: tl.constexpr = TILE.block_k
    PTX: tl.constexpr = TILE.ptx
    pairs = _pairs(tl.reshape(words, [ROWS, BLOCK_K // MX_TILE, 4]), TILE.tokens > FEW_TOKENS)
    if ANY:
        scales = tl.maximum(scales << 7, 0x40) | (((scales + 1) >> 2) & 0x40)
    else:
        scales = (scales + (126 - USUAL_FIRST)) << 7
    if PTX:
        scales = (scales * 0x00010001)[:, :, None, None, None]
        pairs, scales = tl.broadcast(pairs, scales)
        # mul.rn.bf16x2 keeps subnormals.
        multiply_pairs: tl.constexpr = MULTIPLY_ANY if ANY else MULTIPLY_USUAL
        pairs = tl.inline_asm_elementwise(multiply_pairs, "=r,r,r", [pairs, scales], tl.int32, is_pure=True, pack=1)
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if not PTX:
        scales = scales.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, :, None, None, None]
        if ANY:
            one = tl.full((), 0x7E80, tl.int16).to(tl.bfloat16, bitcast=True)
            low, high = low * one, high * one
        low, high = low * scales, high * scales
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 4, 3, 2, 5]), [ROWS, BLOCK_K])


@triton.jit
def unpack_e4m3(w):
    """Return bfloat16 of e4m3, by way of float32: at once the conversion takes sm_90 eight cycles a warp and value."""
    return w.to(tl.float16).to(tl.float32).to(tl.bfloat16)


@triton.jit
def unusual_scales(words):
    """Return bits that are 0 where all four bytes of a word are scales from 16 to 143, which have bit 7 after + 112."""
    return ~(words + 0x70707070) & -0x7F7F7F80


@triton.jit
def _scales(words, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the int32 UE8M0 bytes [ROWS, BLOCK_K / 32] from column `k` on, of words of four."""
    if BLOCK_K < WORD_COLUMNS:
        tl.static_assert(BLOCK_K == WORD_COLUMNS // 2)
        words >>= k // MX_TILE % 4 * 8
        words = tl.join(words, words >> 8)
    else:
        words = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    return tl.reshape(words, [ROWS, BLOCK_K // MX_TILE]) & 0xFF


@triton.jit
def _load_weight(rows, k, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Load COLUMNS elements from column `k` on of `WeightRows`."""
    weight, _, expert, first, o_row = rows
    if TILE.tma:
        w = tl.reshape(weight.load([expert, 0, first, k]), [TILE.rows, COLUMNS])
    else:
        row = expert.to(tl.int64) * N + o_row
        w = tl.load(weight + (row * K)[:, None] + (tl.arange(0, COLUMNS) + k)[None, :])
    return w


@triton.jit
def _multiply_mxfp4(
    rows, p_words, p_x, x, N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ANY: tl.constexpr,
):  # fmt: skip
    """Return the sums, without ANY of usual scales, and bits that are not 0 where a scale is none."""
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    BLOCK_K: tl.constexpr = TILE.block_k
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    found = tl.zeros((ROWS, max(BLOCK_K // WORD_COLUMNS, 1)), tl.int32)
    STEP: tl.constexpr = N if TILE.interleaved else 1
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = tl.load(p_x + k * x.stride, x.mask[None, :], 0.0)
        w = _load_weight(rows, k // NIBBLES, N, K // NIBBLES, BLOCK_K // NIBBLES, TILE)
        words = tl.load(p_words + k // WORD_COLUMNS * STEP)
        found |= unusual_scales(words)
        acc = tl.dot(unpack_mxfp4(w, _scales(words, k, ROWS, BLOCK_K), TILE, ANY), values, acc)
    return acc, found


@triton.jit
def _multiply_blocks(rows, p_x, x, N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    """Return the sums of e4m3 with scales of 32x32 blocks; 32 rows of a tile are those of a block."""
    _, p_scale, expert, _, o_row = rows
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    BLOCK_K: tl.constexpr = TILE.block_k
    STAGES: tl.constexpr = TILE.stages
    o_block = tl.min(tl.reshape(o_row, (ROWS // MX_TILE, MX_TILE)), 1) // MX_TILE
    p_blocks = p_scale + (expert.to(tl.int64) * tl.cdiv(N, MX_TILE) + o_block)[:, None] * (K // MX_TILE)
    p_blocks += tl.arange(0, BLOCK_K // MX_TILE)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = tl.load(p_x + k * x.stride, x.mask[None, :], 0.0)
        w = _load_weight(rows, k, N, K, BLOCK_K, TILE)
        scale = ue8m0_scale(tl.load(p_blocks + k // MX_TILE).to(tl.int32))
        acc = tl.dot(scaled_blocks(w, scale).to(tl.bfloat16), values, acc)
    return acc


@triton.jit
def multiply(
    rows,  # `WeightRows`
    x,  # `TokenRows`
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,  # `GemmTile`
):
    """Return float32 [ROWS, TOKENS] of rows of an expert's weight with rows of x.

    MXFP4 rows in the order of a checkpoint meet x in the unpacked order, interleaved ones x as it is.
    Scales that are not the usual ones, which no trained weight has, cost the tile a second pass.
    """
    _, p_scale, expert, _, o_row = rows
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    BLOCK_K: tl.constexpr = TILE.block_k
    STAGES: tl.constexpr = TILE.stages
    p_x = x.p_x[None, :] + tl.arange(0, BLOCK_K)[:, None] * x.stride
    if TILE.kind == "mxfp4":
        p_words = p_scale + expert.to(tl.int64) * (N * (K // WORD_COLUMNS))
        o_word = tl.arange(0, max(BLOCK_K // WORD_COLUMNS, 1))
        if TILE.interleaved:
            p_words += o_word[None, :] * N + o_row[:, None]
        else:
            p_words += o_row[:, None] * (K // WORD_COLUMNS) + o_word[None, :]
        acc, found = _multiply_mxfp4(rows, p_words, p_x, x, N, K, TILE, STAGES, False)
        acc *= USUAL
        if tl.max(tl.max((found != 0).to(tl.int32), 1), 0) != 0:
            acc, found = _multiply_mxfp4(rows, p_words, p_x, x, N, K, TILE, 1, True)
    elif TILE.kind == "blocks":
        acc = _multiply_blocks(rows, p_x, x, N, K, TILE)
    else:
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            values = tl.load(p_x + k * x.stride, x.mask[None, :], 0.0)
            w = _load_weight(rows, k, N, K, BLOCK_K, TILE)
            if TILE.kind == "e4m3":
                blocks = (expert.to(tl.int64) * tl.cdiv(N, WEIGHT_TILE) + o_row // WEIGHT_TILE) * tl.cdiv(
                    K, WEIGHT_TILE
                )
                scale = tl.load(p_scale + blocks + k // WEIGHT_TILE)
                POWER: tl.constexpr = scale.dtype == tl.uint8
                if POWER:
                    scale = ue8m0_scale(scale.to(tl.int32))
                if POWER and TOKENS > FEW_TOKENS:
                    # Exact but for subnormals; a second accumulator would not fit the registers.
                    scaled = w.to(tl.float16).to(tl.float32) * scale[:, None]
                    acc = tl.dot(scaled.to(tl.bfloat16), values, acc)
                else:
                    acc += tl.dot(unpack_e4m3(w), values) * scale[:, None]
            else:
                acc = tl.dot(w, values, acc)
    return acc


@triton.jit
def swiglu(acc, limit, HALF: tl.constexpr, TOKENS: tl.constexpr):
    """Return clamped silu(gate) * up, float32 [HALF, TOKENS], of a tile; its first half of rows is gate."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, TOKENS]), [1, 2, 0]))
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1 + tl.exp(-gate)) * up
