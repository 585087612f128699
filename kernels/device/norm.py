"""Device functions for RMS norms of rows; reference/fused_q_kv_rmsnorm.py defines what they compute."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from .barriers import scheduling_fence
from .quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)


@triton.jit
def inverse_rms(x, eps, SIZE: tl.constexpr):
    """float32 `[N]`: rsqrt(mean(x^2) + eps) of the rows of float32 `x` `[N, BLOCK]`, which are 0 from SIZE on."""
    return tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / SIZE) + eps)


@triton.jit
def load_weight(p_weight, weight_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 `[1, BLOCK]`, 0 from SIZE on."""
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    return tl.load(p_weight + o_d * weight_stride, mask=o_d < SIZE, other=0.0).to(tl.float32)


@triton.jit
def rms_norm(x, weight, eps, SIZE: tl.constexpr):
    """The rows of float32 `x` `[N, BLOCK]`, 0 from SIZE on, normed and weighted by float32 `weight` `[1, BLOCK]`."""
    return x * inverse_rms(x, eps, SIZE)[:, None] * weight


@triton.jit
def norm_rows(
    row, exists, p_x, p_weight, x_strides, weight_stride, eps,
    ROUNDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows `row` int64 `[N]` of x, normed, ROUNDED `[N, BLOCK]`; 0 from SIZE on, and where `exists` is not.

    They are rounded before, which is nothing where x has that dtype, and after.
    """
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    mask = exists[:, None] & (o_d < SIZE)
    # [N, BLOCK]
    x = tl.load(p_x + row[:, None] * x_strides[0] + o_d * x_strides[1], mask=mask, other=0.0)
    weight = load_weight(p_weight, weight_stride, SIZE, BLOCK)
    scheduling_fence(p_x)
    return rms_norm(x.to(ROUNDED).to(tl.float32), weight, eps, SIZE).to(ROUNDED)


@triton.jit
def store_normed(y, row, exists, p_out, SIZE: tl.constexpr):
    """Store what `norm_rows` gives into the same rows of out, contiguous `[T, SIZE]`."""
    o_d = tl.arange(0, y.shape[1])[None, :].to(tl.int64)
    tl.store(p_out + row[:, None] * SIZE + o_d, y, mask=exists[:, None] & (o_d < SIZE))


@triton.jit
def store_quantized(y, row, exists, p_out, p_scale, tokens, SIZE: tl.constexpr):
    """`store_normed` of e4m3, whose strips of 128 have scales float32 `[n, T]`, contiguous."""
    N: tl.constexpr = y.shape[0]
    STRIPS: tl.constexpr = (y.shape[1] + ACT_TILE - 1) // ACT_TILE
    # A row of less than a strip is one, of its own length.
    tiles = tl.reshape(y.to(tl.float32), (N, STRIPS, y.shape[1] // STRIPS))
    byte = tile_byte(tiles, ACT_AMAX_FLOOR, FP8_MAX)
    store_normed(tl.reshape(e4m3(tiles * ue8m0_inverse(byte)[:, :, None]), (N, y.shape[1])), row, exists, p_out, SIZE)
    o_strip = tl.arange(0, STRIPS)[None, :]
    p_strip = p_scale + o_strip * tokens.to(tl.int64) + row[:, None]
    tl.store(p_strip, ue8m0_scale(byte), mask=exists[:, None] & (o_strip * ACT_TILE < SIZE))
