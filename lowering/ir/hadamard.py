"""The Hadamard transform of vectors in Inductor IR; see `rounded_hadamard` of reference/quant.py.

A row sum over [rows, D | D]. The sign of a term, that of the Sylvester matrix, comes from the bits of its indices: no
matrix is read. D^2 additions for a vector where a tensor core or a butterfly needs fewer steps: for few vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._compat import ir, ops
from .common import I32, Expr, RowLoad, Value, as_f32, const, round_to, row_sum

_FOLDS = (8, 4, 2, 1)
"""Shifts that bring the parity of 16 bits into the lowest of them."""


def rounded_hadamard(
    vector: RowLoad, device: torch.device, rows: Sequence[Expr], dim: int, dtype: torch.dtype
) -> RowLoad:
    """Transform `vector`: its elements and the results are both rounded to `dtype`.

    The order of sums is not the reference's: a result next to a rounding boundary may be the reference's neighbour.
    """
    held = ir.Pointwise.create(
        device=device,
        dtype=dtype,
        inner_fn=lambda index: ops.to_dtype(vector(index[:-1], index[-1]), dtype),
        ranges=[*rows, dim],
    )
    held.realize()
    load = held.make_loader()

    def term(index: Sequence[Expr], e: Expr) -> Value:
        *row, d = index
        value = as_f32(load([*row, e]))
        return ops.where(ops.eq(_parity(d, e), const(0, I32)), value, ops.neg(value))

    load_sum = row_sum(term, device, [*rows, dim], dim)
    return lambda row, d: round_to(ops.mul(load_sum([*row, d]), const(dim**-0.5)), dtype, device)


def _parity(row: Expr, column: Expr) -> Value:
    """1 where row and column share an odd number of set bits, else 0, int32."""
    bits = ops.bitwise_and(ops.index_expr(row, I32), ops.index_expr(column, I32))
    for shift in _FOLDS:
        bits = ops.bitwise_xor(bits, ops.bitwise_right_shift(bits, const(shift, I32)))
    return ops.bitwise_and(bits, const(1, I32))
