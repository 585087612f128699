"""`grouped_linear` in one launch: the result is written where it belongs, whatever the strides of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu import gpu_of, hopper_kernel
from .grouped_matmul import grouped_matmul


def grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    """See the reference. Sums are in another order, the same one for the same call.

    One matrix is torch's to multiply by, but for few tokens on Hopper: there the kernel reads it as fast, in one launch
    always, and begins to before the kernel in front has ended.
    """
    out_dtype = torch.float32 if float32 else x.dtype
    by_group = x if x.dim() == 3 else x.unflatten(1, (groups, -1))
    if groups > 1 or x.device.type != "cuda" or _few(by_group, weight):
        return grouped_matmul(by_group, None, weight, None, out_dtype)
    flat = by_group.flatten(1)
    return flat @ weight.t() if out_dtype is x.dtype else torch.mm(flat, weight.t(), out_dtype=out_dtype)


def _few(x: Tensor, weight: Tensor) -> bool:
    hopper = hopper_kernel(gpu_of(x.device), "grouped_matmul_hopper")
    return hopper is not None and not hopper.hopper_refuses(x, weight, False)


def grouped_linear_refuses(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> str:
    """Why a call cannot use the kernel, or ""."""
    return "a sum of nothing" if weight.shape[1] == 0 else ""
