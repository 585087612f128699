"""Calls for fingerprints of kernels, continued: the engram of DeepSeek-V4.1."""

from __future__ import annotations

from tests.tools.fingerprint_calls import BYTES, EPS, F8, Calls, flags, ints, longs, register, zeros

HIDDEN, STREAMS, ROWS, CHANNELS = 5120, 4, 24, 256


@register
def engram_gate() -> Calls:
    """Yield a step and a prompt; the number of tokens changes the grid alone."""
    for tokens in (1, 2000):
        keys, weights = zeros(tokens, (STREAMS + 1) * HIDDEN), (zeros(STREAMS, HIDDEN) for _ in range(2))
        yield f"{tokens} tokens", (zeros(tokens, STREAMS, HIDDEN), keys, *weights, flags(tokens), EPS)


@register
def engram_embed() -> Calls:
    """Yield a step and a prompt."""
    table = zeros(1000, CHANNELS, dtype=F8), zeros(1000, CHANNELS // 32, dtype=BYTES)
    for tokens in (1, 2000):
        yield f"{tokens} tokens", (longs(tokens, ROWS), *table)


@register
def engram_rows() -> Calls:
    """Yield a step and a prompt."""
    for tokens in (1, 2000):
        of_tokens = (longs(tokens) for _ in range(3))
        yield f"{tokens} tokens", (*of_tokens, ints(256, 8), longs(4), longs(ROWS), 2)
