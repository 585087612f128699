"""Device function that puts key/value vectors into their cache, for every kernel that does."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.barriers import scheduling_fence
from ..device.kv_format import store_kv
from ..device.norm import load_weight, rms_norm
from ..device.rope import load_cos_sin, rotate, table_row


@triton.jit
def insert_rows(
    program, p_cache, p_kv, p_weight, p_slots, p_positions, p_table, p_kv_scale, eps, cache_strides, kv_strides,
    weight_stride, slot_stride, position_stride, table_strides, inserted, num_slots, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Rotate and store ROWS rows of kv; with a weight, norm them first.

    A norm rounds before, to the dtype of kv or, where that is float32, of the weight, and after.
    """
    token = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = token < inserted
    # Slot, position and row are loaded side by side, for tokens without a slot too: what is computed of those is
    # not stored, and a single token waits for two loads instead of four.
    slot = tl.load(p_slots + token * slot_stride, mask=exists, other=-1).to(tl.int64)
    row = table_row(tl.load(p_positions + token * position_stride, mask=exists, other=0), max_pos)
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    m_row = exists[:, None]
    # [ROWS, D]
    x = tl.load(p_kv + token[:, None] * kv_strides[0] + o_d * kv_strides[1], mask=m_row, other=0.0)
    if p_weight is not None:
        weight = load_weight(p_weight, weight_stride, D, D)
    scheduling_fence(p_kv)
    if p_weight is not None:
        WHOLE: tl.constexpr = x.dtype == tl.float32
        DTYPE: tl.constexpr = p_weight.dtype.element_ty if WHOLE else x.dtype
        x = rms_norm(x.to(DTYPE).to(tl.float32), weight, eps, D).to(DTYPE)
    cos, sin = load_cos_sin(p_table + row[:, None] * table_strides[0], table_strides[1], m_row, D, ROPE)
    x = rotate(x.to(tl.float32), cos, sin, ROPE)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    store_kv(p_cache, cache_strides, slot, live, x, p_kv_scale, FORMAT, BLOCK_SIZE)
