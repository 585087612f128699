"""`fp8_grouped_einsum` in one launch, operands read in the strides of `inv_rope_fp8_quant`; one matrix and very many
tokens by torch.

`fp8_grouped_einsum_quant`: on Hopper few tiles are quantised where they are added up, others in a second launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layout import ACT_TILE
from ...reference.common.block_scale import scale_strides
from ..device.quant import why_unsupported_fp8
from ..host.gpu import gpu_of, sm90_module
from .fp8_linear import multiply_by_torch, quantised_refused, quantize_activation, torch_refuses, widened
from .gemm import CLUSTER, SMALL, grouped_matmul


def fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """See the reference. Sums are in another order, the same one for the same call."""
    tokens, groups, _ = a.shape
    if not (quantised_refused(a, a_scale) or torch_refuses(gpu_of(a.device), tokens, b, b_scale, torch.bfloat16)):
        return multiply_by_torch(a[:, 0], a_scale[:, 0], b, widened(b_scale))[:, None]
    return grouped_matmul(a, a_scale, b, b_scale, torch.bfloat16).view(tokens, groups, b.shape[0] // groups)


def fp8_grouped_einsum_refuses(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Why a call cannot use the kernel, or ""."""
    if b.shape[1] == 0:
        return "a sum of nothing"
    return why_unsupported_fp8(a.device)


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference: bit for bit the quantisation of sums in the order that the launch gives them."""
    tokens, size = a.shape[0], b.shape[0]
    launch = _quantising(a, b, b_scale)
    if launch is not None and tokens * size > 0:
        values = torch.empty((tokens, size), dtype=a.dtype, device=a.device)
        by_strip = torch.empty((size // ACT_TILE, tokens), dtype=torch.float32, device=a.device)
        launch(a, a_scale, values, by_strip)
        scale = by_strip.t()
    else:
        values, scale = quantize_activation(fp8_grouped_einsum(a, a_scale, b, b_scale).view(tokens, size))
    shape = tokens, 1, size // ACT_TILE
    return values[:, None], scale.as_strided(shape, scale_strides(tokens, shape[2]))


def _quantising(a: Tensor, b: Tensor, b_scale: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """A launch of a, its scales, values and scales that quantises sums where it adds them up, if there is one."""
    gpu = gpu_of(a.device)
    known = b_scale.view(torch.uint8) if b_scale.dtype is torch.float8_e8m0fnu else b_scale
    few, clusters = (sm90_module(gpu, stem) for stem in (SMALL, CLUSTER))
    if clusters is not None and not clusters.clusters_refuse(a, b, known, False, gpu):
        return lambda x, scale, *out: clusters.launch_clusters_of_tiles(x, scale, b, known, out[0], gpu, out[1])
    if few is not None and not few.hopper_refuses(a, b, False, gpu):
        return lambda x, scale, out, out_scale: few.launch_hopper(x, scale, b, known, out, False, gpu, out_scale)
    return None


def fp8_grouped_einsum_quant_refuses(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Why a call cannot use the kernels, or ""."""
    return fp8_grouped_einsum_refuses(a, a_scale, b, b_scale)
