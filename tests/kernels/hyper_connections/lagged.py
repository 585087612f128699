"""Calls of `mhc_mixes` and `mhc_collapse`, DeepSeek-V4.1's lagged hyper-connections, and their results in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.reference.hyper_connections.mhc_collapse import mhc_collapse
from dsv4_compile.reference.hyper_connections.mhc_mixes import mhc_mixes
from tests.kernels.hyper_connections.calls import COEFFICIENTS, ROUNDING

EPS, HC_EPS = 1e-20, 1e-6


def mixes(
    tokens: int,
    dim: int = 80,
    dtype: torch.dtype = torch.bfloat16,
    *,
    iterations: int = 4,
    gain: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Return arguments of `mhc_mixes` for four streams times `gain`; few iterations hide no error."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    streams = (randn(tokens, 4, dim) * gain).to(dtype)
    return streams, randn(24, 4 * dim) / dim**0.5, randn(24), randn(3), EPS, HC_EPS, iterations


def collapse(
    tokens: int,
    dim: int = 80,
    dtype: torch.dtype = torch.bfloat16,
    *,
    count: int = 4,
    gain: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Return arguments of `mhc_collapse` for `count` streams times `gain`; the streams of token 2 are zeros."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    streams = (randn(tokens, count, dim) * gain).to(dtype)
    streams[2:3] = 0.0
    return streams, torch.sigmoid(randn(tokens, count)), 1 + randn(dim) / 8, EPS


def _wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) else x for x in args)


def wrong_mixes(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> str:
    """Return the first coefficients that differ from those in float64, "" if none do."""
    # In float64 the reference widens nothing.
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        exact = mhc_mixes(*_wide(args))
    for name, got, want in zip(("pre", "post", "comb"), results, exact, strict=True):
        if got.dtype is not torch.float32 or not got.is_contiguous() or got.shape != want.shape:
            return f"{name} is {got.dtype} {tuple(got.shape)} with strides {got.stride()}"
        bad = ~((got.double() - want).abs() <= COEFFICIENTS) & ~(got.isnan() & want.isnan())
        if bad.any():
            return f"{name}: {int(bad.sum())} of {bad.numel()}, by up to {float((got - want).abs().max())}"
    return ""


THREE_ROUNDINGS = 1.5
"""Largest error relative to that of two roundings: the first rounds the values, and so moves their norm, too."""


def wrong_collapse(args: tuple[Any, ...], got: Tensor) -> str:
    """Return how the result differs from that in float64 by more than its roundings, "" if it does not."""
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        want = mhc_collapse(*_wide(args))
    if got.dtype is not args[0].dtype or not got.is_contiguous() or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} with strides {got.stride()}"
    # An element may be a small difference of large terms.
    allowed = THREE_ROUNDINGS * ROUNDING[got.dtype] * torch.maximum(want.abs(), want.abs().amax(-1, keepdim=True) / 64)
    bad = ~((got.double() - want).abs() <= allowed) & ~(got.isnan() & want.isnan())
    return f"{int(bad.sum())} of {bad.numel()} elements" if bad.any() else ""
