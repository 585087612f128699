"""Not a test: experts of DeepSeek-V4.1 of small sizes, in every format."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.layout import cdiv
from dsv4_compile.reference.moe.mx_experts import MxExperts
from tests.kernels.moe.problems import weight


def blocks(rows: int, size: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Return a random e4m3 weight that keeps the magnitude of its inputs, and its scales of 32x32 blocks."""
    packed = (torch.randn(rows, size, device=device) * size**-0.5 * 64).to(torch.float8_e4m3fn)
    return packed, torch.randint(119, 123, (cdiv(rows, 32), cdiv(size, 32)), device=device).to(torch.uint8)


def mxfp4(count: int, rows: int, size: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Return random MXFP4 weights that keep the magnitude of their inputs, and their scales.

    Drawn as bytes: experts of the model in float32 would take a GPU's memory.
    """
    packed = torch.randint(0, 256, (count, rows, size // 2), device=device, dtype=torch.uint8)
    middle = 127 - round(math.log2(3 * math.sqrt(size)))
    scale = torch.randint(middle - 1, middle + 2, (count, rows, size // 32), device=device, dtype=torch.uint8)
    return packed, scale


def mx_experts(
    tokens: int,
    *,
    kind: str = "mxfp4",
    shared: str = "blocks",
    quantize: bool = True,
    hidden: int = 128,
    inner: int = 128,
    shared_inner: int = 96,
    count: int = 5,
    top_k: int = 2,
    device: Any = "cpu",
) -> MxExperts:
    """Return random arguments."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :top_k].int()
    weights = torch.rand(tokens, top_k, device=device) + 0.2
    (w13, w13_scale), (w2, w2_scale) = (
        mxfp4(count, n, k, device) if kind == "mxfp4" else weight(kind, count, n, k, device=device)
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    pair = [
        blocks(n, k, device) if shared == "blocks" else weight(shared, n, k, device=device)
        for n, k in ((2 * shared_inner, hidden), (hidden, shared_inner))
    ]
    (s13, s13_scale), (s2, s2_scale) = pair
    scales = w13_scale, w2_scale, s13_scale, s2_scale
    return MxExperts(x, ids, weights, w13, w2, s13, s2, *scales, quantize_input=quantize)
