"""Calls for fingerprints of kernels, continued: lagged hyper-connections of DeepSeek-V4.1."""

from __future__ import annotations

from tests.tools.fingerprint_calls import EPS, F32, Calls, register, zeros

HIDDEN = 5120


@register
def mhc_mixes() -> Calls:
    """Yield one launch, two and three."""
    for tokens in (1, 32, 512, 2048):
        mix = (zeros(*shape, dtype=F32) for shape in ((24, 4 * HIDDEN), (24,), (3,)))
        yield f"{tokens} tokens", (zeros(tokens, 4, HIDDEN), *mix, EPS, EPS)


@register
def mhc_collapse() -> Calls:
    """Yield a step and a prompt; the number of tokens changes the grid alone."""
    for tokens in (1, 4096):
        yield f"{tokens} tokens", (zeros(tokens, 4, HIDDEN), zeros(tokens, 4, dtype=F32), zeros(HIDDEN), EPS)
