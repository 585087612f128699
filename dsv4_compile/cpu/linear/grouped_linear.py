"""A linear layer of groups, a GEMM after the other, each into its columns of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.linear import grouped_linear as reference
from ..common.invariant import before_sums_by_torch
from .mm import mm_out


def grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    """Compute the op of this name as its reference does, up to the order of sums."""
    if x.dtype is not torch.float32 or not weight.is_contiguous():
        before_sums_by_torch()
        return reference.grouped_linear(x, weight, groups, float32)
    tokens, (rows, size) = x.shape[0], weight.shape
    by_group, columns = x.reshape(tokens, groups, size), rows // groups
    out = torch.empty((tokens, rows), dtype=x.dtype)
    for group in range(groups):
        places = slice(group * columns, (group + 1) * columns)
        mm_out(by_group[:, group], weight[places], out[:, places])
    return out
