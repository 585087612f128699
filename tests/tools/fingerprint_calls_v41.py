"""Calls for fingerprints of kernels, continued: ops of DeepSeek-V4.1."""

from __future__ import annotations

from tests.tools.fingerprint_calls import F32, Calls, flags, register, zeros

EXPERTS, HIDDEN = 384, 5120


@register
def moe_route_images() -> Calls:
    """Yield the router for one token, and for several with a float32 gate."""
    biases = zeros(EXPERTS, dtype=F32), zeros(EXPERTS, dtype=F32)
    for tokens, dtype in ((1, None), (32, F32), (2000, None)):
        gate = zeros(EXPERTS, HIDDEN) if dtype is None else zeros(EXPERTS, HIDDEN, dtype=dtype)
        yield f"{tokens} tokens", (zeros(tokens, HIDDEN), gate, *biases, flags(tokens), 6, 1.5, 0.5)
