"""Calls of `engram_gate`, and how results differ from those in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.reference.engram.engram_gate import engram_gate
from tests.kernels.hyper_connections.calls import ROUNDING


def arguments(
    tokens: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    count: int = 4,
    gain: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Return arguments with streams and keys times `gain`; every third token is of an image."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    streams, keys = (randn(tokens, count, dim) * gain).to(dtype), (randn(tokens, (count + 1) * dim) * gain).to(dtype)
    image = torch.arange(tokens, device=device) % 3 == 2
    return streams, keys, (1 + randn(count, dim) / 8).to(dtype), 1 + randn(count, dim) / 8, image, 1e-20


def wrong(args: tuple[Any, ...], got: Tensor) -> str:
    """Return how the result differs from that in float64, "" if by no more than a rounding."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    # In float64 the reference widens nothing.
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        want = engram_gate(*wide)
    if got.dtype is not args[0].dtype or not got.is_contiguous() or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} with strides {got.stride()}"
    # An element may be a small difference of large terms.
    allowed = ROUNDING[got.dtype] * torch.maximum(want.abs(), want.abs().nan_to_num(0.0).amax(-1, keepdim=True) / 64)
    bad = ~((got.double() - want).abs() <= allowed) & ~(got.isnan() & want.isnan())
    return f"{int(bad.sum())} of {bad.numel()} elements" if bad.any() else ""
