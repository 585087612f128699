"""Device function for the Hadamard transform; reference/quant.py defines it."""

from __future__ import annotations

import triton
import triton.language as tl

HADAMARD_ROWS = 16
"""Vectors that are transformed together at least: the smallest tile of a matrix unit."""
HADAMARD_DIMS = (16, 32, 64, 128)
"""Lengths that it is built for: the matrix is made in registers."""


@triton.jit
def rounded_hadamard(x, DTYPE: tl.constexpr):
    """Orthonormal Hadamard transform of the rows of float32 `x` `[M, D]`, rounded to DTYPE before and after.

    Products are exact. Sums are float32 in an order of their own, so a result next to a rounding boundary may be the
    reference's neighbour.
    """
    D: tl.constexpr = x.shape[1]
    o_d = tl.arange(0, D)
    # An element of the Sylvester matrix is -1 where row and column share an odd number of set bits.
    parity = o_d[:, None] & o_d[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    # [D, D]
    matrix = (1 - 2 * (parity & 1)).to(tl.float32).to(DTYPE)
    y = tl.dot(x.to(DTYPE), matrix, input_precision="ieee") * (D**-0.5)
    return y.to(DTYPE).to(tl.float32)
