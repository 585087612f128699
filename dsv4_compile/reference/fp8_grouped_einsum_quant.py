"""The grouped output projection, quantised for the product behind it."""

from __future__ import annotations

from torch import Tensor

from .block_scale import quantize_rows
from .fp8_grouped_einsum import fp8_grouped_einsum


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
