"""GEMM of a tile of an expert's rows with a tile of tokens, in three weight formats.

The weight is the first operand of the MMA, [rows, K] x [K, tokens]: its rows fill a tensor core however few tokens an
expert has. MXFP4 is unpacked to bfloat16 in registers, in the order in which wgmma reads its first operand from them,
so that no unpacked weight goes through shared memory (reference/moe/expert_weights.py). e4m3 is widened, and the
float32 sum of a block of 128 elements of K is multiplied by the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import MX_TILE as _MX_TILE
from ...layout import WEIGHT_TILE as _WEIGHT_TILE
from ..device.quant import ue8m0_scale

MX_TILE, WEIGHT_TILE = tl.constexpr(_MX_TILE), tl.constexpr(_WEIGHT_TILE)
NIBBLES = tl.constexpr(8)  # e2m1 in a 32-bit word
WORD_COLUMNS = tl.constexpr(128)  # elements of K whose four scales are one word


@triton.jit
def checkpoint_column(o):
    """Return which element of K, in the order of a checkpoint, position `o` of an unpacked row holds."""
    return (o & -32) | ((o & 7) << 2) | ((o >> 2) & 2) | ((o >> 4) & 1)


@triton.jit
def unpacked_position(k):
    """Return at which position of an unpacked row, in the order of a checkpoint, element `k` is."""
    return (k & -32) | ((k & 1) << 4) | ((k & 2) << 2) | ((k >> 2) & 7)


@triton.jit
def unpack_mxfp4(words, scales, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PTX: tl.constexpr):
    """Return bfloat16 [ROWS, BLOCK_K] of int32 words [ROWS, BLOCK_K / 8] and int32 UE8M0 bytes [ROWS, BLOCK_K / 32].

    Two nibbles become a pair of bfloat16 by shifts: the sign at bit 15 and the rest at bits 8 to 6 is the value times
    2^-126, subnormals included. It is multiplied by 2^126 and then by the scale, each exact; at once both would exceed
    bfloat16's exponent. A scale of 2^-127 is subnormal, and byte 255 is NaN.
    """
    words = tl.reshape(words, [ROWS, BLOCK_K // MX_TILE, 4])
    pair0 = ((words << 12) & -0x7FFF8000) | ((words << 6) & 0x01C001C0)
    pair1 = ((words << 8) & -0x7FFF8000) | ((words << 2) & 0x01C001C0)
    pair2 = ((words << 4) & -0x7FFF8000) | ((words >> 2) & 0x01C001C0)
    pair3 = (words & -0x7FFF8000) | ((words >> 6) & 0x01C001C0)
    pairs = tl.join(tl.join(pair0, pair2), tl.join(pair1, pair3))
    scales = tl.maximum(scales << 7, 0x40) | (((scales + 1) >> 2) & 0x40)
    if PTX:
        scales = (scales * 0x00010001)[:, :, None, None, None]
        pairs, scales = tl.broadcast(pairs, scales)
        # mul.rn.bf16x2 keeps subnormals; the constant is hoisted out of the loop.
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b32 one, value; mov.b32 one, 0x7E807E80; mul.rn.bf16x2 value, $1, one; "
            "mul.rn.bf16x2 $0, value, $2; }",
            "=r,r,r",
            [pairs, scales],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if not PTX:
        one = tl.full((), 0x7E80, tl.int16).to(tl.bfloat16, bitcast=True)
        scales = scales.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, :, None, None, None]
        low, high = low * one * scales, high * one * scales
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 4, 3, 2, 5]), [ROWS, BLOCK_K])


@triton.jit
def _mxfp4_scales(p_scale, expert, o_row, k, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK_K: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Load the int32 UE8M0 bytes [ROWS, BLOCK_K / 32] of a step, a word of four at a time."""
    o_word = k // WORD_COLUMNS + tl.arange(0, BLOCK_K // WORD_COLUMNS)
    p_scale += expert.to(tl.int64) * (N * (K // WORD_COLUMNS))
    if INTERLEAVED:
        words = tl.load(p_scale + o_word[None, :] * N + o_row[:, None])
    else:
        words = tl.load(p_scale + o_row[:, None] * (K // WORD_COLUMNS) + o_word[None, :])
    words = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    return tl.reshape(words, [ROWS, BLOCK_K // MX_TILE]) & 0xFF


@triton.jit
def multiply(
    weight,  # a TMA descriptor of [E, HALVES, N / HALVES, K] with TMA, else a pointer to [E, N, K], contiguous
    p_scale,  # MXFP4: words [E, N, K / 128] int32; e4m3: [E, N / 128, K / 128]; contiguous
    expert,
    first,  # first row of the first half
    o_row,  # [ROWS] rows of the expert's weight
    p_x,  # [TOKENS] pointers to the tokens' rows
    x_stride,
    mask,  # [TOKENS]
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PERMUTED: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return float32 [ROWS, TOKENS] of rows of an expert's weight with rows of x.

    PERMUTED reads x in the order of unpacked checkpoint rows; INTERLEAVED weights need no permutation.
    """
    PACK: tl.constexpr = NIBBLES if FORMAT == "mxfp4" else 1
    o_k, o_w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PACK)
    o_x = checkpoint_column(o_k) if PERMUTED else o_k
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(p_x[None, :] + (k + o_x)[:, None] * x_stride, mask[None, :], 0.0)
        if TMA:
            w = tl.reshape(weight.load([expert, 0, first, k // PACK]), [ROWS, BLOCK_K // PACK])
        else:
            row = expert.to(tl.int64) * N + o_row
            w = tl.load(weight + (row * (K // PACK))[:, None] + (o_w + k // PACK)[None, :])
        if FORMAT == "mxfp4":
            scales = _mxfp4_scales(p_scale, expert, o_row, k, N, K, ROWS, BLOCK_K, INTERLEAVED)
            acc = tl.dot(unpack_mxfp4(w, scales, ROWS, BLOCK_K, PTX), x, acc)
        elif FORMAT == "e4m3":
            o_block = (expert.to(tl.int64) * tl.cdiv(N, WEIGHT_TILE) + o_row // WEIGHT_TILE) * tl.cdiv(K, WEIGHT_TILE)
            scale = tl.load(p_scale + o_block + k // WEIGHT_TILE)
            if scale.dtype == tl.uint8:
                scale = ue8m0_scale(scale.to(tl.int32))
            acc += tl.dot(w.to(tl.bfloat16), x) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc)
    return acc
