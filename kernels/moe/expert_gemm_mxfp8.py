"""GEMM of MXFP4 weights with mxfp8 rows of few tokens on Hopper: an MMA of e4m3 for the 32 elements with one scale.

e2m1 becomes e4m3 in registers, as in expert_gemm_sm90.py. Both operands have a power of two as scale for 32 elements of
K, which is the K of an MMA, so products are exact and both scales multiply its float32 sums. Hopper adds the products
of an e4m3 MMA with fewer bits than float32 has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...layout import MX_TILE as _MX_TILE
from ..device.mx_values import MX_AMAX_FLOOR
from ..device.quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse
from .expert_gemm import WORD_COLUMNS, unusual_scales
from .expert_gemm_sm90 import BLOCK_BYTES, E2M1_UNIT, scale_of_word, unpack_e2m1

MX_TILE = tl.constexpr(_MX_TILE)


class MxRows(NamedTuple):
    """Rows of tokens in mxfp8 in a kernel.

    Attributes:
        p_x: `[2 * TOKENS]` pointers to rows of e4m3 in the order of unpacked MXFP4 rows, and `mask` `[2 * TOKENS]`, of
            which the second half is false: WGMMA takes at least 16 columns.
        p_words: `[TOKENS]` pointers to rows of int32 words, each four UE8M0 bytes, and `word_mask` `[TOKENS]`.
    """

    p_x: Any
    mask: Any
    p_words: Any
    word_mask: Any


@triton.jit
def mxfp8_tiles(tiles):
    """Return e4m3 values and int32 UE8M0 bytes of float32 `tiles`, rows of 32 in the last dim. Infinity becomes NaN."""
    byte = tile_byte(tiles, MX_AMAX_FLOOR, FP8_MAX)
    # x - x is NaN for infinity, which e4m3 does not have.
    return e4m3((tiles + (tiles - tiles)) * tl.expand_dims(ue8m0_inverse(byte), -1)), byte


@triton.jit
def _first_half(sums):
    """Return the first half of the columns."""
    ROWS: tl.constexpr = sums.shape[0]
    TOKENS: tl.constexpr = sums.shape[1] // 2
    first, _ = tl.split(tl.permute(tl.reshape(sums, [ROWS, 2, TOKENS]), (0, 2, 1)))
    return first


@triton.jit
def _add_group(acc, w, x, w_words, x_words, GROUP: tl.constexpr, PTX: tl.constexpr, ANY: tl.constexpr):
    """Add the product of uint8 [ROWS, 16] and e4m3 [32, 2 * TOKENS], whose scales are byte GROUP of words."""
    sums = _first_half(tl.dot(unpack_e2m1(w, PTX), x))
    factor = scale_of_word(w_words, GROUP, ANY)[:, None]
    x_factor = scale_of_word(x_words, GROUP, False)[None, :]
    if ANY:
        # First the scale of x: the product of both scales may not be a float32.
        acc += sums * x_factor * factor
    else:
        acc += sums * (factor * x_factor)
    return acc


@triton.jit
def _add_block(acc, w, w_words, x, k, PTX: tl.constexpr, ANY: tl.constexpr):
    """Add the product of uint8 [ROWS, 64] and the 128 elements of K from `k` on of `MxRows` x."""
    even, odd = tl.split(tl.permute(tl.reshape(w, [w.shape[0], 2, 2, BLOCK_BYTES // 4]), (0, 3, 1, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    p_x = x.p_x[None, :] + (k + tl.arange(0, MX_TILE))[:, None]
    mask = x.mask[None, :]
    x0, x1 = tl.load(p_x, mask, 0.0), tl.load(p_x + MX_TILE, mask, 0.0)
    x2, x3 = tl.load(p_x + 2 * MX_TILE, mask, 0.0), tl.load(p_x + 3 * MX_TILE, mask, 0.0)
    x_words = tl.load(x.p_words + k // WORD_COLUMNS, x.word_mask, 0)
    acc = _add_group(acc, w0, x0, w_words, x_words, 0, PTX, ANY)
    acc = _add_group(acc, w1, x1, w_words, x_words, 1, PTX, ANY)
    acc = _add_group(acc, w2, x2, w_words, x_words, 2, PTX, ANY)
    return _add_group(acc, w3, x3, w_words, x_words, 3, PTX, ANY)


@triton.jit
def _multiply(rows, p_words, x, K: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ANY: tl.constexpr):
    """Return the sums, and bits that are not 0 where a scale of the weight is no usual one."""
    weight, _, expert, first, _ = rows
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    BLOCK_K: tl.constexpr = TILE.block_k
    PTX: tl.constexpr = TILE.ptx
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    unusual = tl.zeros((ROWS,), tl.int32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = weight.load([expert, 0, first, k // 2])
        words = tl.load(p_words + k // WORD_COLUMNS)
        if BLOCK_K == 2 * WORD_COLUMNS:
            w0, w1 = tl.split(tl.permute(tl.reshape(w, [ROWS, 2, BLOCK_BYTES]), (0, 2, 1)))
            words0, words1 = tl.split(words)
            unusual |= unusual_scales(words0) | unusual_scales(words1)
            acc = _add_block(acc, w0, words0, x, k, PTX, ANY)
            acc = _add_block(acc, w1, words1, x, k + WORD_COLUMNS, PTX, ANY)
        else:
            words0 = tl.reshape(words, [ROWS])
            unusual |= unusual_scales(words0)
            acc = _add_block(acc, tl.reshape(w, [ROWS, BLOCK_BYTES]), words0, x, k, PTX, ANY)
    return acc, unusual


@triton.jit
def multiply_mxfp8(
    rows,  # `WeightRows`, a descriptor of uint8 [E, HALVES, N / HALVES, K / 2] with a box of BLOCK_K / 2 bytes
    x,  # `MxRows`
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,  # `GemmTile`
):
    """Return float32 [ROWS, TOKENS] of rows of an expert's MXFP4 weight with rows of x.

    Scales that are not the usual ones, which no trained weight has, cost the tile a second pass.
    """
    _, p_words, expert, _, o_row = rows
    WORDS: tl.constexpr = K // WORD_COLUMNS
    o_word = tl.arange(0, TILE.block_k // WORD_COLUMNS)
    p_words += expert.to(tl.int64) * (N * WORDS) + o_row[:, None] * WORDS + o_word[None, :]
    acc, unusual = _multiply(rows, p_words, x, K, TILE, TILE.stages, False)
    if tl.max((unusual != 0).to(tl.int32), 0) != 0:
        acc, unusual = _multiply(rows, p_words, x, K, TILE, 1, True)
    return acc * E2M1_UNIT
