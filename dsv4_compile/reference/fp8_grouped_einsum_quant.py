"""The grouped output projection, quantised for the product behind it."""

from __future__ import annotations

from torch import Tensor

from .block_scale import quantize_activation
from .fp8_grouped_einsum import fp8_grouped_einsum
from .quant import ue8m0_scale


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_grouped_einsum`, rounded to bfloat16, then quantised as `fp8_linear` does its input: the same bytes.

    Args:
        a, a_scale, b, b_scale: as of `fp8_grouped_einsum`, with groups of whole strips: N is a multiple of 128.
    Returns:
        e4m3 `[T, 1, G * N]`, contiguous, and float32 scales `[T, 1, G * N / 128]`, a view of contiguous
        `[G * N / 128, T]`: strides (1, T * G * N / 128, T). Of one group, as `fp8_grouped_einsum` takes them for the
        next product.
    """
    z = fp8_grouped_einsum(a, a_scale, b, b_scale)
    tokens, groups, rows = z.shape
    values, byte = quantize_activation(z.view(tokens, 1, groups * rows))
    scale = ue8m0_scale(byte)
    out = scale.new_empty_strided(scale.shape, scale_strides(tokens, scale.shape[2]))
    return values, out.copy_(scale)


def scale_strides(tokens: int, count: int) -> tuple[int, int, int]:
    """Strides of `[T, 1, n]` scales stored as contiguous `[n, T]`."""
    return 1, count * tokens, tokens
