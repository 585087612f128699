"""`fp8_grouped_einsum_quant`: on Hopper few tokens are quantised where they are added up, others in a second launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ACT_TILE
from ..reference.fp8_grouped_einsum_quant import scale_strides
from .fp8_grouped_einsum import fp8_grouped_einsum, fp8_grouped_einsum_refuses
from .fp8_linear import quantize_activation
from .gpu import gpu_of, hopper_kernel


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference: bit for bit the quantisation of sums in the order that the launch gives them."""
    tokens, size = a.shape[0], b.shape[0]
    gpu = gpu_of(a.device)
    few = hopper_kernel(gpu, "grouped_matmul_hopper")
    if few is not None and tokens * size > 0 and not few.hopper_refuses(a, b, False):
        values = torch.empty((tokens, size), dtype=a.dtype, device=a.device)
        by_strip = torch.empty((size // ACT_TILE, tokens), dtype=torch.float32, device=a.device)
        known = b_scale.view(torch.uint8) if b_scale.dtype is torch.float8_e8m0fnu else b_scale
        few.launch_hopper(a, a_scale, b, known, values, False, gpu, by_strip)
        scale = by_strip.t()
    else:
        values, scale = quantize_activation(fp8_grouped_einsum(a, a_scale, b, b_scale).view(tokens, size))
    shape = tokens, 1, size // ACT_TILE
    return values[:, None], scale.as_strided(shape, scale_strides(tokens, shape[2]))


def fp8_grouped_einsum_quant_refuses(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Why a call cannot use the kernels, or ""."""
    return fp8_grouped_einsum_refuses(a, a_scale, b, b_scale)
