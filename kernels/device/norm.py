"""RMS norms of rows as Triton functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from .barriers import scheduling_fence
from .quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)


class Norm(NamedTuple):
    """RMS norm with a weight, in a kernel."""

    p_weight: Any
    weight_stride: Any
    eps: Any


@triton.jit
def inverse_rms(x, eps, SIZE: tl.constexpr):
    """Return rsqrt(mean(x^2) + eps), float32 `[N]`, of the rows of float32 `x` `[N, BLOCK]`, 0 from column SIZE on."""
    return tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / SIZE) + eps)


@triton.jit
def load_weight(p_weight, weight_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the weight of a norm as float32 `[1, BLOCK]`, 0 from column SIZE on."""
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    return tl.load(p_weight + o_d * weight_stride, mask=o_d < SIZE, other=0.0).to(tl.float32)


@triton.jit
def rms_norm(x, weight, eps, SIZE: tl.constexpr):
    """Normalize the rows of float32 `x` `[N, BLOCK]`, 0 from column SIZE on, times float32 `weight` `[1, BLOCK]`."""
    return x * inverse_rms(x, eps, SIZE)[:, None] * weight


@triton.jit
def norm_rows(row, exists, x, norm, ROUNDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load and normalize rows `row` int64 `[N]` of x: ROUNDED `[N, BLOCK]`, 0 from column SIZE on and unless `exists`.

    Values are rounded to ROUNDED before (a no-op if x already has that dtype) and after. `x` is `Strided`.
    """
    p_x, x_strides = x
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    mask = exists[:, None] & (o_d < SIZE)
    # [N, BLOCK]
    values = tl.load(p_x + row[:, None] * x_strides[0] + o_d * x_strides[1], mask=mask, other=0.0)
    weight = load_weight(norm.p_weight, norm.weight_stride, SIZE, BLOCK)
    scheduling_fence(p_x)
    return rms_norm(values.to(ROUNDED).to(tl.float32), weight, norm.eps, SIZE).to(ROUNDED)


@triton.jit
def store_normed(y, row, exists, p_out, SIZE: tl.constexpr):
    """Store the result of `norm_rows` to the same rows of a contiguous `[T, SIZE]`."""
    o_d = tl.arange(0, y.shape[1])[None, :].to(tl.int64)
    tl.store(p_out + row[:, None] * SIZE + o_d, y, mask=exists[:, None] & (o_d < SIZE))


@triton.jit
def store_quantized(y, row, exists, p_out, p_scale, tokens, SIZE: tl.constexpr):
    """Quantize the result of `norm_rows` per 128 columns; store e4m3 and contiguous float32 scales `[n, T]`."""
    N: tl.constexpr = y.shape[0]
    STRIPS: tl.constexpr = (y.shape[1] + ACT_TILE - 1) // ACT_TILE
    # A row of fewer than 128 columns is a single, shorter tile.
    tiles = tl.reshape(y.to(tl.float32), (N, STRIPS, y.shape[1] // STRIPS))
    byte = tile_byte(tiles, ACT_AMAX_FLOOR, FP8_MAX)
    store_normed(tl.reshape(e4m3(tiles * ue8m0_inverse(byte)[:, :, None]), (N, y.shape[1])), row, exists, p_out, SIZE)
    o_strip = tl.arange(0, STRIPS)[None, :]
    p_strip = p_scale + o_strip * tokens.to(tl.int64) + row[:, None]
    tl.store(p_strip, ue8m0_scale(byte), mask=exists[:, None] & (o_strip * ACT_TILE < SIZE))
