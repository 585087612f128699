"""`fp8_grouped_einsum_quant` in two launches: the product, and the quantisation of `fp8_linear`."""

from __future__ import annotations

from torch import Tensor

from ..layout import ACT_TILE
from ..reference.fp8_grouped_einsum_quant import scale_strides
from .fp8_grouped_einsum import fp8_grouped_einsum, fp8_grouped_einsum_refuses
from .fp8_linear import quantize_activation


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference: bit for bit the quantisation of what `fp8_grouped_einsum` gives."""
    tokens, count = a.shape[0], b.shape[0] // ACT_TILE
    values, scale = quantize_activation(fp8_grouped_einsum(a, a_scale, b, b_scale).view(tokens, b.shape[0]))
    return values[:, None], scale.as_strided((tokens, 1, count), scale_strides(tokens, count))


def fp8_grouped_einsum_quant_refuses(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Why a call cannot use the kernels, or ""."""
    return fp8_grouped_einsum_refuses(a, a_scale, b, b_scale)
