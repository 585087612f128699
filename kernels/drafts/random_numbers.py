"""Uniform numbers keyed by seed, position and stream: the bits of reference/drafts/random_numbers.py."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**-53)
WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def uniform(seed, position, STREAM: tl.constexpr):
    """Return float64 numbers in [0, 1) of int64 seeds and positions."""
    low = (position & WORD).to(tl.uint32)
    high = ((position >> 32) & WORD).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, _, _ = tl.philox(seed, low, high, zero + STREAM, zero)
    bits = ((w0 >> 5).to(tl.int64) << 26) | (w1 >> 6).to(tl.int64)
    return bits.to(tl.float64) * UNIT
