"""Device function that inserts key/value vectors into their cache, for every kernel that does."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.barriers import scheduling_fence
from ..device.kv_format import store_kv
from ..device.norm import load_weight, rms_norm
from ..device.rope import load_cos_sin, rotate, table_row


class Insert(NamedTuple):
    """Pointers and strides of an insert.

    Attributes:
        p_cache: pages, `num_slots` slots.
        p_kv: vectors; p_slots: their slots, of which there are `inserted`.
        p_kv_scale: one float32, or None.
    """

    p_cache: Any
    cache_strides: Any
    p_kv: Any
    kv_strides: Any
    p_slots: Any
    slot_stride: Any
    p_kv_scale: Any
    inserted: Any
    num_slots: Any


class InsertShape(NamedTuple):
    """Compile-time sizes of an insert.

    Attributes:
        fmt, block_size: format and slots of a page.
        rows: of a program. dim, rope: dims, and how many are rotated.
        dtype: that a norm rounds float32 vectors to; None: that of its weight.
    """

    fmt: str
    block_size: int
    rows: int
    dim: int
    rope: int
    dtype: Any = None


@triton.constexpr_function
def rounded_dtype(of, weight, dtype):
    """Return the dtype that `result_dtype` of the reference returns."""
    return of if of != tl.float32 else weight if dtype is None else dtype


@triton.jit
def insert_rows(program, insert, norm, rope, SHAPE: tl.constexpr):
    """Norm, unless `norm` is None, rotate and store the rows of kv of a program.

    A norm rounds before, to `rounded_dtype`, and after.
    """
    FORMAT: tl.constexpr = SHAPE.fmt
    ROWS: tl.constexpr = SHAPE.rows
    D: tl.constexpr = SHAPE.dim
    ROPE: tl.constexpr = SHAPE.rope
    token = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = token < insert.inserted
    # Slot, position and row are loaded side by side, also for tokens without a slot: their results are not stored, and
    # a single token waits for two loads instead of four.
    slot = tl.load(insert.p_slots + token * insert.slot_stride, mask=exists, other=-1).to(tl.int64)
    row = table_row(tl.load(rope.p_positions + token * rope.position_stride, mask=exists, other=0), rope.max_pos)
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    m_row = exists[:, None]
    # [ROWS, D]
    p_x = insert.p_kv + token[:, None] * insert.kv_strides[0] + o_d * insert.kv_strides[1]
    x = tl.load(p_x, mask=m_row, other=0.0)
    if norm is not None:
        weight = load_weight(norm.p_weight, norm.weight_stride, D, D)
    scheduling_fence(insert.p_kv)
    if norm is not None:
        ROUNDED: tl.constexpr = rounded_dtype(x.dtype, norm.p_weight.dtype.element_ty, SHAPE.dtype)
        x = rms_norm(x.to(ROUNDED).to(tl.float32), weight, norm.eps, D).to(ROUNDED)
    p_row = rope.p_table + row[:, None] * rope.table_strides[0]
    cos, sin = load_cos_sin(p_row, rope.table_strides[1], m_row, D, ROPE)
    x = rotate(x.to(tl.float32), cos, sin, ROPE)
    live = (slot >= 0) & (slot < insert.num_slots)
    slot = tl.where(live, slot, 0)
    store_kv(insert.p_cache, insert.cache_strides, slot, live, x, insert.p_kv_scale, FORMAT, SHAPE.block_size)
