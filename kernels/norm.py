"""Device functions for RMS norms of rows; reference/fused_q_kv_rmsnorm.py defines what they compute."""

from __future__ import annotations

import triton
import triton.language as tl


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
def normed(x, weight, eps, SIZE: tl.constexpr):
    """The rows of float32 `x` `[N, BLOCK]`, 0 from SIZE on, normed and weighted by float32 `weight` `[1, BLOCK]`."""
    return x * inverse_rms(x, eps, SIZE)[:, None] * weight


@triton.jit
def norm_rows(
    row, exists, p_out, p_x, p_weight, x_strides, weight_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Norm the rows `row` int64 `[N]` of x into the same rows of out, contiguous `[T, SIZE]`, where `exists` says so.

    They are rounded to the dtype of out before, which is none where x has it, and after.
    """
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    mask = exists[:, None] & (o_d < SIZE)
    # [N, BLOCK]
    x = tl.load(p_x + row[:, None] * x_strides[0] + o_d * x_strides[1], mask=mask, other=0.0)
    weight = load_weight(p_weight, weight_stride, SIZE, BLOCK)
    y = normed(x.to(p_out.dtype.element_ty).to(tl.float32), weight, eps, SIZE)
    tl.store(p_out + row[:, None] * SIZE + o_d, y.to(p_out.dtype.element_ty), mask=mask)
