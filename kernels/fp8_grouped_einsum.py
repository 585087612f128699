"""`fp8_grouped_einsum` in one launch, operands read in the strides of `inv_rope_fp8_quant`."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped_matmul import grouped_matmul
from .quant import refuses_fp8


def fp8_grouped_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """See the reference. Sums are in another order, the same one for the same call."""
    tokens, groups, _ = a.shape
    return grouped_matmul(a, a_scale, b, b_scale, torch.bfloat16).view(tokens, groups, -1)


def fp8_grouped_einsum_refuses(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """Why a call cannot use the kernel, or ""."""
    if b.shape[1] == 0:
        return "a sum of nothing"
    return refuses_fp8(a.device)
