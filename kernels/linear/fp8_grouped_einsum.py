"""`fp8_grouped_einsum`: a GEMM that reads the strides of `inv_rope_fp8_quant`; very many tokens of one group by torch.

`fp8_grouped_einsum_quant` quantizes results in the GEMM's epilogue on sm_90, elsewhere in a second launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layout import ACT_TILE
from ...ops.common.invariance import TOKENS
from ...reference.common.block_scale import scale_strides
from ..device.quant import why_unsupported_fp8
from ..host.gpu import gpu_of, sm90_module
from .fp8_linear import (
    multiply_by_torch,
    quantize_activation,
    why_unsupported_torch,
    why_unsupported_torch_input,
    widened,
)
from .gemm import CLUSTER, SMALL, Operands, grouped_gemm


def fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Multiply each group of `a` by its rows of `b`. Sums are in a fixed order, not the reference's."""
    tokens, groups, _ = a.shape
    unsupported = why_unsupported_torch(gpu_of(a.device), tokens, b, b_scale, torch.bfloat16)
    if not unsupported and not why_unsupported_torch_input(a, a_scale):
        return multiply_by_torch(a[:, 0], a_scale[:, 0], b, widened(b_scale))[:, None]
    out = grouped_gemm(Operands(a, a_scale, b, b_scale), torch.bfloat16)
    return out.view(tokens, groups, b.shape[0] // groups)


def invariant_fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, level: str = TOKENS) -> Tensor:
    """Run the op with one tiling for calls of any size."""
    out = grouped_gemm(Operands(a, a_scale, b, b_scale), torch.bfloat16, invariant=level)
    return out.view(a.shape[0], a.shape[1], b.shape[0] // a.shape[1])


def why_unsupported_fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    return "K is 0, it must be at least 1" if b.shape[1] == 0 else why_unsupported_fp8(a.device)


def fp8_grouped_einsum_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the result of `fp8_grouped_einsum` per 128 columns, bit-identical to doing so in a second step."""
    tokens, size = a.shape[0], b.shape[0]
    launch = _quantizing_launch(Operands(a, a_scale, b, b_scale))
    if launch is not None and tokens * size > 0:
        values = torch.empty((tokens, size), dtype=a.dtype, device=a.device)
        scale = torch.empty((size // ACT_TILE, tokens), dtype=torch.float32, device=a.device)
        launch(values, scale)
        scale = scale.t()
    else:
        values, scale = quantize_activation(fp8_grouped_einsum(a, a_scale, b, b_scale).view(tokens, size))
    return _strided(values, scale)


def invariant_fp8_grouped_einsum_quant(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, level: str = TOKENS
) -> tuple[Tensor, Tensor]:
    """Run the op with one tiling for calls of any size; results are quantized in a separate launch."""
    out = invariant_fp8_grouped_einsum(a, a_scale, b, b_scale, level)
    return _strided(*quantize_activation(out.view(a.shape[0], b.shape[0])))


def _strided(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and scales of one group as the op returns them."""
    tokens, size = values.shape
    shape = tokens, 1, size // ACT_TILE
    return values[:, None], scale.as_strided(shape, scale_strides(tokens, shape[2]))


def _quantizing_launch(operands: Operands) -> Callable[[Tensor, Tensor], None] | None:
    """Return a launch that fills quantized values and scales, None if no kernel quantizes its results."""
    a, _, b, b_scale = operands
    gpu = gpu_of(a.device)
    if b_scale is not None and b_scale.dtype is torch.float8_e8m0fnu:
        operands = operands._replace(weight_scale=b_scale.view(torch.uint8))
    small, cluster = (sm90_module(gpu, name) for name in (SMALL, CLUSTER))
    if cluster is not None and not cluster.why_unsupported(operands, False, gpu):
        return lambda out, out_scale: cluster.launch(operands, out, gpu, out_scale)
    if small is not None and not small.why_unsupported(a, b, False, gpu):
        return lambda out, out_scale: small.launch(operands, out, False, gpu, out_scale)
    return None


why_unsupported_fp8_grouped_einsum_quant = why_unsupported_fp8_grouped_einsum
