"""The grouped output projection on quantised operands: one matrix per group of heads.

The grouped output projection, quantised for the product behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import ACT_TILE, cdiv
from ..common.block_scale import dequantize_activation, dequantize_weight, quantize_rows, unpack_scales


def fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """`z[t, g, n] = sum_k a[t, g, k] * b[g, n, k]`, operands dequantised to float32, one rounding to bfloat16.

    The order of the sum is free. With power-of-two scales every product is exact, and so are TF32 operands.

    Args:
        a: e4m3 `[T, G, K]`, any strides.
        a_scale: float32 `[T, G, ceil(K/128)]`, or int32 `[T, G, ceil(K/512)]` packed; from `inv_rope_fp8_quant`, or
            of one group from `fp8_grouped_einsum_quant`.
        b: e4m3 `[G * N, K]`, a group's rows together. Never a result of the same step: Hopper's kernels may read it
            before those in front of them have ended.
        b_scale: float32, float8_e8m0fnu or uint8 UE8M0 `[ceil(G*N / 128), ceil(K / 128)]`; blocks do not restart at a
            group.
    Returns:
        bfloat16 `[T, G, N]`, contiguous.
    """
    _, groups, size = a.shape
    if a_scale.dtype is torch.int32:
        a_scale = unpack_scales(a_scale, cdiv(size, ACT_TILE))
    weight = dequantize_weight(b, b_scale).view(groups, -1, size)
    z = torch.bmm(dequantize_activation(a, a_scale).transpose(0, 1), weight.transpose(1, 2))
    return z.transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format)


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_grouped_einsum`, rounded to bfloat16, then quantised as `fp8_linear` does its input: the same bytes.

    Args:
        a, a_scale, b, b_scale: as of `fp8_grouped_einsum`, with groups of whole strips: N is a multiple of 128.
    Returns:
        e4m3 `[T, 1, G * N]`, contiguous, and float32 scales `[T, 1, G * N / 128]`, a view of contiguous
        `[G * N / 128, T]`: strides (1, T * G * N / 128, T). Of one group, as `fp8_grouped_einsum` takes them for the
        next product.
    """
    return quantize_rows(fp8_grouped_einsum(a, a_scale, b, b_scale).flatten(1))
