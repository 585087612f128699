"""Calls for fingerprints of kernels, continued: ops of DeepSeek-V4.1."""

from __future__ import annotations

from dsv4_compile import layout
from tests.tools.fingerprint_calls import BYTES, F8, F32, Calls, flags, register, zeros

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
