"""Calls for fingerprints of kernels, continued: ops of DeepSeek-V4.1."""

from __future__ import annotations

import torch

from dsv4_compile import layout
from tests.tools.fingerprint_calls import BYTES, F8, F32, Args, Calls, flags, ints, register, zeros

EXPERTS, HIDDEN = 384, 5120


@register
def moe_route_images() -> Calls:
    """Yield the router for one token, and for several with a float32 gate."""
    biases = zeros(EXPERTS, dtype=F32), zeros(EXPERTS, dtype=F32)
    for tokens, dtype in ((1, None), (32, F32), (2000, None)):
        gate = zeros(EXPERTS, HIDDEN) if dtype is None else zeros(EXPERTS, HIDDEN, dtype=dtype)
        yield f"{tokens} tokens", (zeros(tokens, HIDDEN), gate, *biases, flags(tokens), 6, 1.5, 0.5)


@register
def mx_linear() -> Calls:
    """Yield projections of the model, rounded in the GEMM and before, and one with an exact input."""
    projections = {"wq_a": (1280, HIDDEN), "wq_b": (32768, 1280), "wo_b": (HIDDEN, 8192)}
    for name, (rows, size) in projections.items():
        scales = zeros(rows // layout.MX_TILE, size // layout.MX_TILE, dtype=BYTES)
        for tokens in (1, 16, 64, 512):
            yield f"{name}, {tokens} tokens", (zeros(tokens, size), zeros(rows, size, dtype=F8), scales)
    yield "exact", (zeros(8, size), zeros(rows, size, dtype=F8), scales, False)


@register
def mx_experts() -> Calls:
    """Yield experts of the model, rounded and exact, the shared one as a whole and in eighths."""
    experts, inner = 16, 2304

    def scaled(dtype: torch.dtype, *shape: int) -> Args:
        tile = layout.MX_TILE
        blocks = shape[0] // tile, shape[1] // tile
        if dtype is BYTES:
            return zeros(experts, shape[0], shape[1] // 2, dtype=BYTES), zeros(
                experts, shape[0], blocks[1], dtype=BYTES
            )
        return zeros(*shape, dtype=dtype), zeros(*blocks, dtype=BYTES)

    (w13, w13_scale), (w2, w2_scale) = scaled(BYTES, 2 * inner, HIDDEN), scaled(BYTES, HIDDEN, inner)
    for tokens, of, quantise in (
        (1, 1, True),
        (8, 1, True),
        (8, 8, True),
        (40, 1, False),
        (128, 1, True),
        (2000, 1, True),
    ):
        (s13, s13_scale), (s2, s2_scale) = scaled(F8, 2 * inner // of, HIDDEN), scaled(F8, HIDDEN, inner // of)
        places = zeros(tokens, HIDDEN), ints(tokens, 6), zeros(tokens, 6, dtype=F32)
        weights = w13, w2, s13, s2, w13_scale, w2_scale, s13_scale, s2_scale
        yield f"{tokens} tokens, {of} ranks, {quantise}", (*places, *weights, 10.0, 0, quantise)
