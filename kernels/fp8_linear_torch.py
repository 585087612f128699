"""Products of one matrix in e4m3 by torch's own, cuBLAS's, where that is the faster one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import WEIGHT_TILE
from .gpu import HOPPER, Gpu

FIRST = 1024
"""Tokens from which on it is, on an H200."""
FIRST_CUDA = (12, 9)
"""CUDA that torch must be built for: for an older one it raises at the call."""
TOKENS_ALIGN, STRIPS_ALIGN = 16, 4
"""What it takes multiples of. torch 2.11 has cuBLAS refuse 1027 tokens ("CUBLAS_STATUS_NOT_SUPPORTED"), and wants
columns of the weight's scales filled up to four."""


def torch_refuses(gpu: Gpu, tokens: int, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> str:
    """Why the product is ours to make, or ""."""
    if gpu.capability != HOPPER:
        return "other GPUs take scales of another form"
    if _cuda() < FIRST_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, which has no such scales"
    if tokens < FIRST:
        return f"it is the faster one from {FIRST} tokens on"
    if tokens % TOKENS_ALIGN or weight.shape[1] % (STRIPS_ALIGN * WEIGHT_TILE):
        return f"it takes multiples of {TOKENS_ALIGN} tokens and of {STRIPS_ALIGN} strips"
    if dtype is not torch.bfloat16 or any(size % WEIGHT_TILE for size in weight.shape):
        return "it gives bfloat16, of whole blocks"
    return "" if weight.is_contiguous() and weight_scale.is_contiguous() else "it takes weights without gaps"


def quantised_refused(values: Tensor, scale: Tensor) -> str:
    """Why it does not take `values` `[T, G, K]` with these scales as they are, or ""."""
    tokens, groups, _ = values.shape
    if groups != 1:
        return "it multiplies one matrix"
    if scale.dtype is not torch.float32 or scale.stride(0) != 1 or scale.stride(2) != tokens:
        return "it takes float32 scales, those of neighbouring tokens side by side"
    return "" if values.is_contiguous() else "it takes values without gaps"


def widened(scale: Tensor) -> Tensor:
    """Scales of a weight in float32; of bytes, a launch."""
    return scale if scale.dtype is torch.float32 else scale.view(torch.float8_e8m0fnu).to(torch.float32)


def _cuda() -> tuple[int, ...]:
    """The CUDA that torch is built for, (0,) for none."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def multiply_by_torch(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """bfloat16 `[T, N]` of e4m3 `values` `[T, K]` and `weight` `[N, K]`.

    Args:
        scale, weight_scale: float32, of strips of 128 and of blocks of 128x128; a column of `scale` is contiguous.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    scale = scale.as_strided(scale.shape, (1, len(values)))  # of a single strip too
    return scaled_mm(values, weight.t(), scale, recipes[0], weight_scale.t(), recipes[1], output_dtype=torch.bfloat16)
