"""`q_norm_rope`, and `q_norm_rope_kv_insert`, which inserts key/value vectors in the same launch.

The grid is flat. The first programs insert a few key/value rows each; every other program takes a few heads of one
token. Both halves then cost one launch, and the insert overlaps the queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.preprocess.q_norm_rope import QNormRopeKvInsertArguments
from ..device.norm import inverse_rms
from ..device.quant import e4m3, inverse_of, why_unsupported_fp8
from ..device.rope import Rope, load_cos_sin, rotate, table_row
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .insert_rows import Insert, InsertShape, insert_rows
from .kv_rope_insert import SPREAD_ROWS, pages_of, tile, why_unsupported_dim


class Strides(NamedTuple):
    """Strides of the tensors of a launch; None for those that it does not have."""

    q: tuple[int, ...]
    kv: tuple[int, ...] | None
    cache: tuple[int, ...]
    slots: int | None
    positions: int
    table: tuple[int, ...]


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        heads, out_heads: heads of the queries, and with padding.
        insert: sizes of the insert; heads have its dims, and a program as many of them as rows.
    """

    heads: int
    out_heads: int
    insert: InsertShape


class Queries(NamedTuple):
    """Pointers of the queries and of the result, strides, and the eps of the norm."""

    p_out: Any
    p_q: Any
    strides: Any
    p_q_scale: Any
    eps: Any


@triton.jit
def _norm_rope_heads(program, queries, rope, SHAPE: tl.constexpr):
    """Norm and rotate `rows` heads of one token."""
    HEADS: tl.constexpr = SHAPE.heads
    OUT_HEADS: tl.constexpr = SHAPE.out_heads
    INSERT: tl.constexpr = SHAPE.insert
    ROWS: tl.constexpr = INSERT.rows
    D: tl.constexpr = INSERT.dim
    BLOCKS: tl.constexpr = (OUT_HEADS + ROWS - 1) // ROWS
    p_out, p_q, q_strides, p_q_scale, eps = queries
    token = (program // BLOCKS).to(tl.int64)
    o_h = ((program % BLOCKS) * ROWS + tl.arange(0, ROWS))[:, None]
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    row = table_row(tl.load(rope.p_positions + token * rope.position_stride), rope.max_pos)

    p_x = p_q + token * q_strides[0] + o_h.to(tl.int64) * q_strides[1] + o_d * q_strides[2]
    # [ROWS, D]
    x = tl.load(p_x, mask=o_h < HEADS, other=0.0).to(tl.float32)
    p_row = rope.p_table + row * rope.table_strides[0]
    cos, sin = load_cos_sin(p_row, rope.table_strides[1], True, D, INSERT.rope)
    x *= inverse_rms(x, eps, D)[:, None]
    x = rotate(x, cos, sin, INSERT.rope)
    if p_q_scale is not None:
        x = x * inverse_of(p_q_scale)
    if OUT_HEADS > HEADS:
        # A rotated zero may be -0, and without eps its norm is infinite.
        x = tl.where(o_h < HEADS, x, 0.0)
    y = x.to(p_out.dtype.element_ty) if p_q_scale is None else e4m3(x)
    tl.store(p_out + (token * OUT_HEADS + o_h) * D + o_d, y, mask=o_h < OUT_HEADS)


@triton.jit(
    do_not_specialize=["inserted", "num_slots", "max_pos"],
    do_not_specialize_on_alignment=["p_slots", "p_positions", "p_q_scale", "p_kv_scale"],
)
def q_norm_rope_kv_insert_kernel(
    p_out,  # [T, out_heads, dim] in q's dtype or e4m3, contiguous
    p_cache,  # pages, or None
    p_q,  # [T, heads, dim]
    p_kv,  # [>= inserted, dim] or None
    p_slots,  # [inserted] int or None
    p_positions,  # [>= T] int
    p_table,  # [max_pos, rope] float32
    p_q_scale,  # [1] float32 or None
    p_kv_scale,  # [1] float32 or None
    eps,
    strides,
    inserted,
    num_slots,
    max_pos,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Insert rows in programs p < ceil(inserted / rows); norm and rotate heads in the others."""
    pdl_prologue(PDL)
    program = tl.program_id(0)
    INSERT: tl.constexpr = SHAPE.insert
    inserts = tl.cdiv(inserted, INSERT.rows)
    rope = Rope(p_positions, strides.positions, p_table, strides.table, max_pos)
    if program < inserts:
        if p_kv is not None:
            insert = Insert(
                p_cache, strides.cache, p_kv, strides.kv, p_slots, strides.slots, p_kv_scale, inserted, num_slots
            )  # fmt: skip
            insert_rows(program, insert, None, rope, INSERT)
    else:
        _norm_rope_heads(program - inserts, Queries(p_out, p_q, strides.q, p_q_scale, eps), rope, SHAPE)


def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Return the reference's result, up to the order of the sum of squares: values may be neighbours."""
    no: Any = None
    call = QNormRopeKvInsertArguments(q, no, no, no, positions, cos_sin_cache, eps, 1, "plain", padded_heads, q_scale)
    return q_norm_rope_kv_insert(call)


def invariant_q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Launch `q_norm_rope` with the heads of a program of a large call."""
    no: Any = None
    return invariant_q_norm_rope_kv_insert(
        QNormRopeKvInsertArguments(q, no, no, no, positions, cos_sin_cache, eps, 1, "plain", padded_heads, q_scale)
    )


def q_norm_rope_kv_insert(call: QNormRopeKvInsertArguments) -> Tensor:
    """Run `q_norm_rope` and, if there are vectors to insert, `kv_rope_insert` in one launch."""
    rows = call.q.shape[0] * max(call.q.shape[1], call.padded_heads)
    return _launch(call, *tile(rows + (0 if call.kv is None else call.slot_mapping.shape[0])))


def invariant_q_norm_rope_kv_insert(call: QNormRopeKvInsertArguments) -> Tensor:
    """Launch `q_norm_rope_kv_insert` with the rows of a program of a large call."""
    return _launch(call, *tile(SPREAD_ROWS + 1))


def _launch(call: QNormRopeKvInsertArguments, rows: int, warps: int) -> Tensor:
    """Launch with so many rows and warps of a program."""
    q, kv, cache, slots, positions, table, eps, block_size, cache_format, padded_heads, q_scale, kv_scale = call
    tokens, heads, dim = q.shape
    dtype = q.dtype if q_scale is None else torch.float8_e4m3fn
    out = q.new_empty((tokens, max(heads, padded_heads), dim), dtype=dtype)
    inserted, num_slots = 0, 0
    strides = Strides(q.stride(), None, (0, 0, 0), None, positions.stride(0), table.stride())
    if kv is not None:
        cache = pages_of(cache, cache_format, block_size)
        inserted, num_slots = slots.shape[0], cache.shape[0] * block_size
        strides = strides._replace(kv=kv.stride(), cache=cache.stride(), slots=slots.stride(0))
    insert = InsertShape(cache_format, block_size, rows, dim, table.shape[1])
    programs = cdiv(inserted, rows) + tokens * cdiv(out.shape[1], rows)
    if programs == 0:
        return out
    launch_kernel(
        q_norm_rope_kv_insert_kernel,
        (programs,),
        out,
        cache,
        q,
        kv,
        slots,
        positions,
        table,
        q_scale,
        kv_scale,
        eps,
        strides,
        inserted,
        num_slots,
        table.shape[0],
        SHAPE=Shape(heads, out.shape[1], insert),
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice: bytes would differ now and then.
        enable_fp_fusion=False,
        **pdl_arguments(positions.device, programs),
    )
    return out


def why_unsupported_q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    return why_unsupported_dim(q.shape[2]) or ("" if q_scale is None else why_unsupported_fp8(q.device))


def why_unsupported_q_norm_rope_kv_insert(call: QNormRopeKvInsertArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    if call.q.shape[2] != call.kv.shape[1]:
        return f"queries have {call.q.shape[2]} dims and keys {call.kv.shape[1]}"
    fp8 = call.q_scale is not None or call.cache_format != "plain"
    return why_unsupported_dim(call.q.shape[2]) or (why_unsupported_fp8(call.q.device) if fp8 else "")
