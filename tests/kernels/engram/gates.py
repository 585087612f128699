"""Calls of `engram_gate`, and how results differ from those in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.reference.engram.engram_gate import SMALLEST_DOT, engram_gate
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


DOT_ERROR = 1e-6
"""Largest error of a dot product in float32, relative to the root of the sum of squares of its terms."""


def gate_error(streams: Tensor, keys_value: Tensor, q: Tensor, k: Tensor, image: Tensor, eps: float) -> Tensor:
    """Return `[T, N]`: how far gates of float64 arguments move if dot products do by `DOT_ERROR`.

    The slope of a square root has no bound: a dot product near 0 has few correct digits, or none in its sign.
    """
    count, dim = streams.shape[1:]
    keys = keys_value.unflatten(1, (count + 1, dim))[:, :count]
    norms = torch.rsqrt(streams.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps) * dim**-0.5
    terms = streams * (q * k) * keys
    dot, error = terms.sum(-1) * norms, terms.norm(dim=-1) * norms * DOT_ERROR
    low, high = (
        torch.sigmoid(torch.copysign(x.abs().clamp_min(SMALLEST_DOT).sqrt(), x)) for x in (dot - error, dot + error)
    )
    return torch.where(image[:, None], 0.0, high - low)


def wrong(args: tuple[Any, ...], got: Tensor) -> str:
    """Return how the result differs from that in float64, "" if by no more than a rounding, or an error of the gate."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    # In float64 the reference widens nothing.
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        want = engram_gate(*wide)
    if got.dtype is not args[0].dtype or not got.is_contiguous() or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} with strides {got.stride()}"
    # An element may be a small difference of large terms.
    allowed = ROUNDING[got.dtype] * torch.maximum(want.abs(), want.abs().nan_to_num(0.0).amax(-1, keepdim=True) / 64)
    value = wide[1][:, -want.shape[2] :].abs()
    allowed += (gate_error(*wide)[:, :, None] * value[:, None]).nan_to_num(0.0)
    bad = ~((got.double() - want).abs() <= allowed) & ~(got.isnan() & want.isnan())
    return f"{int(bad.sum())} of {bad.numel()} elements" if bad.any() else ""
