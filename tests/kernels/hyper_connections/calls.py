"""Calls of the hyper-connection kernels, and tolerances of their results against float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.reference.hyper_connections import mhc_head, mhc_pre
from dsv4_compile.reference.hyper_connections.mhc_post import mhc_post

OPS = ("mhc_pre", "mhc_boundary", "mhc_head")
EPS, HC_EPS, ITERATIONS = 1e-6, 1e-6, 20
COEFFICIENTS = 2e-5
"""Largest error of post and comb, which are of order one."""
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-5}
"""Largest relative error of y and the streams: the neighbouring value, or a sum in a different order."""


def arguments(
    op: str,
    tokens: int,
    dim: int = 80,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    gain: float = 1.0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Return arguments of `op` for four streams; `gain` multiplies the streams and the output."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    head = op == "mhc_head"
    rows = 4 if head else 24
    streams = (randn(tokens, 4, dim) * gain).to(dtype)
    mix = randn(rows, 4 * dim) / dim**0.5, randn(rows), randn(1 if head else 3), 1 + randn(dim) / 8, EPS, HC_EPS
    returned = (
        (randn(tokens, dim) * gain).to(dtype),
        2 * torch.sigmoid(randn(tokens, 4)),
        torch.softmax(randn(tokens, 4, 4), 1),
    )
    if head:
        return streams, *mix, *returned
    return (streams, *mix, iterations) if op == "mhc_pre" else (streams, *returned, *mix, iterations)


def results(found: Any) -> list[Tensor]:
    """Return the results of an op as a list."""
    return [found] if isinstance(found, Tensor) else list(found)


def exact(op: str, args: tuple[Any, ...], got: Any) -> list[Tensor]:
    """Return the results of `op` in float64, with new streams rounded, those of `got` where it has them."""
    wide = [x.double() if isinstance(x, Tensor) else x for x in args]
    streams, *rest = wide
    # In float64 the references widen nothing.
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        if op == "mhc_pre":
            return results(mhc_pre.mhc_pre(*wide))
        if op == "mhc_boundary":
            streams = mhc_post(*wide[:4])
            return [streams, *mhc_pre.mhc_pre(results(got)[0].double(), *wide[4:])]
        if len(rest) > 6:
            streams = mhc_post(streams, *rest[6:]).to(args[0].dtype).double()
        return [mhc_head.mhc_head(mhc_head.MhcHead(streams, *rest[:6]))]


def wrong(op: str, args: tuple[Any, ...], got: Any) -> str:
    """Return the first difference of `got` from the results of `op` in float64, "" if there is none."""
    for name, actual, want in zip(_names(op), results(got), exact(op, args, got), strict=True):
        if not actual.is_contiguous() or actual.shape != want.shape:
            return f"{name} is {tuple(actual.shape)} with strides {actual.stride()}"
        error = (actual.double() - want).abs()
        allowed = torch.full_like(want, COEFFICIENTS)
        if name in ("streams", "y"):
            # A new stream or y may be a small difference of large terms. Those of the head are streams before their
            # rounding: float32 and float64 round one in a million to different neighbours.
            largest = want.abs().amax(-1, keepdim=True) / (4 if op == "mhc_head" else 64)
            allowed = ROUNDING[actual.dtype] * torch.maximum(want.abs(), largest)
        bad = ~(error <= allowed) & ~(actual.isnan() & want.isnan())
        if bad.any():
            worst = float((error / allowed).nan_to_num(torch.inf).max())
            return f"{name}: {int(bad.sum())} of {bad.numel()} elements, worst by a factor of {worst:.3g}"
    return ""


def _names(op: str) -> tuple[str, ...]:
    return {"mhc_pre": ("y", "post", "comb"), "mhc_boundary": ("streams", "y", "post", "comb"), "mhc_head": ("y",)}[op]
