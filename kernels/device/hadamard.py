"""The Hadamard transform as a Triton function."""

from __future__ import annotations

import triton
import triton.language as tl

HADAMARD_ROWS = 16
"""Fewest rows of a call: the smallest M of a tensor core."""
HADAMARD_DIMS = (16, 32, 64, 128)
"""Supported lengths: the matrix is built in registers."""


@triton.jit
def rounded_hadamard(x, DTYPE: tl.constexpr):
    """Multiply the rows of float32 `x` `[M, D]` by the orthonormal Hadamard matrix, rounded to DTYPE before and after.

    Products are exact; the order of float32 sums differs from the reference's, so that a result next to a rounding
    boundary may be off by one unit.
    """
    D: tl.constexpr = x.shape[1]
    o_d = tl.arange(0, D)
    # An element of the Sylvester matrix is -1 if row & column has an odd number of set bits.
    parity = o_d[:, None] & o_d[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    # [D, D]
    matrix = (1 - 2 * (parity & 1)).to(tl.float32).to(DTYPE)
    y = tl.dot(x.to(DTYPE), matrix, input_precision="ieee") * (D**-0.5)
    return y.to(DTYPE).to(tl.float32)
