"""`fp8_grouped_einsum` in one launch, operands read in the strides of `inv_rope_fp8_quant`; one matrix and very many
tokens by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_linear_torch import multiply_by_torch, quantised_refused, torch_refuses, widened
from .gpu import gpu_of
from .grouped_matmul import grouped_matmul
from .quant import refuses_fp8


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
    return refuses_fp8(a.device)
