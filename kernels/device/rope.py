"""Interleaved RoPE as Triton functions.

A vector of D elements, D even, is D / 2 pairs of neighbours; the last ROPE / 2 are rotated. Both elements of a
pair are in one thread, so that a rotation moves nothing between threads and reads each element once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rope(NamedTuple):
    """Angles of tokens: positions and their stride, the table, its strides and its number of rows."""

    p_positions: Any
    position_stride: Any
    p_table: Any
    table_strides: Any
    max_pos: Any


@triton.jit
def table_row(position, max_pos):
    """Return the int64 row of the RoPE table for integer `position`, clamped to the table."""
    return tl.minimum(tl.maximum(position.to(tl.int64), 0), max_pos - 1)


@triton.jit
def load_cos_sin(p_row, stride_column, m_row, D: tl.constexpr, ROPE: tl.constexpr):
    """Load cosine and sine of each pair as float32 `[N, D / 2]`; 0 for pairs that are not rotated and outside `m_row`.

    `p_row` points to the rows of the table, `[N, 1]` or one for all; `m_row` is bool of that shape.
    """
    # [1, D / 2]
    o_pair = tl.arange(0, D // 2)[None, :] - (D - ROPE) // 2
    p_cos = p_row + o_pair * stride_column
    m_pair = (o_pair >= 0) & m_row
    cos = tl.load(p_cos, mask=m_pair, other=0.0)
    sin = tl.load(p_cos + (ROPE // 2) * stride_column, mask=m_pair, other=0.0)
    return cos, sin


@triton.jit
def rotate(x, cos, sin, ROPE: tl.constexpr):
    """Rotate the last ROPE dims of float32 `x` `[N, D]` by `cos`, `sin` `[N or 1, D / 2]`; negate `sin` to undo.

    Products and sums are rounded separately if the kernel is launched with `enable_fp_fusion=False`.
    """
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (N, D // 2, 2)))
    # A select, not a product with (1, 0): elements that are not rotated may be infinite, and zeros keep their sign.
    turns = tl.arange(0, D // 2)[None, :] >= (D - ROPE) // 2
    turned_even = tl.where(turns, even * cos - odd * sin, even)
    turned_odd = tl.where(turns, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (N, D))
