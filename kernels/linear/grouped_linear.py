"""`grouped_linear`: few tokens by our GEMM in one launch, more by torch, whose GEMMs fill the GPU then."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.common.invariance import TOKENS
from ..host.gpu import gpu_of, sm90_module
from .gemm import FEW_TOKENS, SMALL, Operands, grouped_gemm


def grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    """Multiply each group of `x` by its rows of the weight. Sums are in a fixed order, not the reference's.

    Few tokens of a single group use our kernel on sm_90 only: there it reads the weight as fast as torch, always in one
    launch, and starts before the previous kernel has ended.
    """
    out_dtype = torch.float32 if float32 else x.dtype
    by_group = x if x.dim() == 3 else x.unflatten(1, (groups, -1))
    few = x.shape[0] <= FEW_TOKENS if groups > 1 else _fits_small(by_group, weight)
    if x.device.type != "cuda" or few or (groups > 1 and out_dtype is not x.dtype):
        return grouped_gemm(Operands(by_group, None, weight, None), out_dtype)
    return multiply_by_torch(by_group, weight, out_dtype)


def invariant_grouped_linear(
    x: Tensor, weight: Tensor, groups: int, float32: bool = False, level: str = TOKENS
) -> Tensor:
    """Run the op with one tiling for calls of any size."""
    by_group = x if x.dim() == 3 else x.unflatten(1, (groups, -1))
    out_dtype = torch.float32 if float32 else x.dtype
    return grouped_gemm(Operands(by_group, None, weight, None), out_dtype, invariant=level)


def invariant_mm(x: Tensor, weight: Tensor, level: str) -> Tensor:
    """Return `[T, N]`: `x` `[T, K]` times `weight` `[K, N]`, at a value of `dsv4.batch_invariant`."""
    return grouped_gemm(Operands(x[:, None], None, weight.t(), None), x.dtype, invariant=level)


def multiply_by_torch(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return `[T, G * N]` of x `[T, G, K]`; each group's GEMM writes its slice of the result."""
    tokens, groups, _ = x.shape
    if groups == 1:
        flat = x.flatten(1)
        return flat @ weight.t() if out_dtype is x.dtype else torch.mm(flat, weight.t(), out_dtype=out_dtype)
    matrices = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    out = torch.empty((tokens, groups, matrices.shape[2]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out.flatten(1)


def _fits_small(x: Tensor, weight: Tensor) -> bool:
    gpu = gpu_of(x.device)
    small = sm90_module(gpu, SMALL)
    return small is not None and not small.why_unsupported(x, weight, False, gpu)


def why_unsupported_grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    return "K is 0, it must be at least 1" if weight.shape[1] == 0 else ""
