"""Not a test: experts of DeepSeek-V4.1 of small sizes, in every format."""

from __future__ import annotations

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
    w13, w13_scale = weight(kind, count, 2 * inner, hidden, device=device)
    w2, w2_scale = weight(kind, count, hidden, inner, device=device)
    pair = [
        blocks(n, k, device) if shared == "blocks" else weight(shared, n, k, device=device)
        for n, k in ((2 * shared_inner, hidden), (hidden, shared_inner))
    ]
    (s13, s13_scale), (s2, s2_scale) = pair
    scales = w13_scale, w2_scale, s13_scale, s2_scale
    return MxExperts(x, ids, weights, w13, w2, s13, s2, *scales, quantize_input=quantize)
