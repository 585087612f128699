"""`grouped_linear`: few tokens in one launch of our own, more by torch, whose products fill the GPU then."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.gpu import gpu_of, sm90_module
from .gemm import FEW_TOKENS, SMALL, grouped_matmul


def grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    """See the reference. Sums are in another order, the same one for the same call.

    Few tokens of a single matrix are torch's too, but on Hopper: there the kernel reads it as fast, in one launch
    always, and begins to before the kernel in front has ended.
    """
    out_dtype = torch.float32 if float32 else x.dtype
    by_group = x if x.dim() == 3 else x.unflatten(1, (groups, -1))
    few = x.shape[0] <= FEW_TOKENS if groups > 1 else _few(by_group, weight)
    if x.device.type != "cuda" or few or (groups > 1 and out_dtype is not x.dtype):
        return grouped_matmul(by_group, None, weight, None, out_dtype)
    return by_torch(by_group, weight, out_dtype)


def by_torch(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`[T, G * N]` of x `[T, G, K]`: the products of groups are written where they belong, into slices of the result.

    On an H200 it takes 23 us where a kernel of ours takes 32, for 128 tokens and V4-Flash's wo_a in bfloat16, and 51
    where that takes 62, for 512 (`dsv4 bench gemm --only op=grouped_linear`).
    """
    tokens, groups, _ = x.shape
    if groups == 1:
        flat = x.flatten(1)
        return flat @ weight.t() if out_dtype is x.dtype else torch.mm(flat, weight.t(), out_dtype=out_dtype)
    matrices = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    out = torch.empty((tokens, groups, matrices.shape[2]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out.flatten(1)


def _few(x: Tensor, weight: Tensor) -> bool:
    gpu = gpu_of(x.device)
    hopper = sm90_module(gpu, SMALL)
    return hopper is not None and not hopper.hopper_refuses(x, weight, False, gpu)


def grouped_linear_refuses(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> str:
    """Why a call cannot use the kernel, or ""."""
    return "a sum of nothing" if weight.shape[1] == 0 else ""
