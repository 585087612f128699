"""`q_norm_rope`, `kv_rope_insert` and both in one launch; reference/q_norm_rope_kv_insert.py defines them.

The grid is flat. Its first programs insert ROWS key/value rows each; every other program takes ROWS heads of one
token. Side by side, the two halves cost one launch, and the insert hides behind the queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import byte_pages, cdiv
from ..device.norm import inverse_rms
from ..device.quant import e4m3, inverse_of, why_unsupported_fp8
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .kv_rope_insert import insert_rows

SPREAD_ROWS = 1536
"""Up to this many heads and keys in all, a program takes one. Measured on an H200."""


@triton.jit
def _norm_rope_heads(
    program, p_out, p_q, p_positions, p_table, p_q_scale, eps, q_strides, position_stride, table_strides, max_pos,
    HEADS: tl.constexpr, OUT_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate ROWS heads of one token."""
    BLOCKS: tl.constexpr = (OUT_HEADS + ROWS - 1) // ROWS
    token = (program // BLOCKS).to(tl.int64)
    o_h = ((program % BLOCKS) * ROWS + tl.arange(0, ROWS))[:, None]
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    row = table_row(tl.load(p_positions + token * position_stride), max_pos)

    p_x = p_q + token * q_strides[0] + o_h.to(tl.int64) * q_strides[1] + o_d * q_strides[2]
    # [ROWS, D]
    x = tl.load(p_x, mask=o_h < HEADS, other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(p_table + row * table_strides[0], table_strides[1], True, D, ROPE)
    x *= inverse_rms(x, eps, D)[:, None]
    x = rotate(x, cos, sin, ROPE)
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
    p_out,  # [T, OUT_HEADS, D] in q's dtype or e4m3, contiguous; None without queries
    p_cache,  # pages in FORMAT
    p_q,  # [T, HEADS, D]
    p_kv,  # [>= inserted, D]
    p_slots,  # [inserted] int
    p_positions,  # [>= T] int
    p_table,  # [max_pos, ROPE] float32
    p_q_scale,  # [1] float32 or None
    p_kv_scale,  # [1] float32 or None
    eps,
    q_strides,
    kv_strides,
    cache_strides,
    slot_stride,
    position_stride,
    table_strides,
    inserted,
    num_slots,
    max_pos,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p < ceil(inserted / ROWS) inserts, the others take the heads of a token, ROWS each."""
    pdl_prologue(PDL)
    program = tl.program_id(0)
    inserts = tl.cdiv(inserted, ROWS)
    if p_q is None:
        # No branch is left, and parameters are read in front of all loads. Behind a branch the assembler lets one share
        # a scoreboard with the load of a position, and so waits for that before it loads the row.
        tl.assume(program < inserts)
    if program < inserts:
        if p_kv is not None:
            insert_rows(
                program, p_cache, p_kv, None, p_slots, p_positions, p_table, p_kv_scale, eps, cache_strides, kv_strides,
                0, slot_stride, position_stride, table_strides, inserted, num_slots, max_pos,
                FORMAT, BLOCK_SIZE, ROWS, D, ROPE,
            )  # fmt: skip
    elif p_q is not None:
        _norm_rope_heads(
            program - inserts, p_out, p_q, p_positions, p_table, p_q_scale, eps, q_strides, position_stride,
            table_strides, max_pos, HEADS, OUT_HEADS, ROWS, D, ROPE,
        )  # fmt: skip


def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    """See the reference. The sum of squares is in another order: results may be the neighbouring value."""
    out = _new_heads(q, padded_heads, q_scale)
    _launch(out, q, None, None, None, positions, cos_sin_cache, eps, 1, "plain", q_scale, None)
    return out


def kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
) -> None:
    """See the reference; the stored bytes are equal."""
    _launch(
        None, None, kv, k_cache, slot_mapping, positions, cos_sin_cache, 0.0, block_size, cache_format, None, kv_scale
    )


def q_norm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    block_size: int,
    cache_format: str,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """`q_norm_rope` and `kv_rope_insert` in one launch."""
    out = _new_heads(q, padded_heads, q_scale)
    _launch(
        out, q, kv, k_cache, slot_mapping, positions, cos_sin_cache, eps, block_size, cache_format, q_scale, kv_scale
    )
    return out


def q_norm_rope_refuses(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return _why_not(q, fp8=q_scale is not None)


def kv_rope_insert_refuses(
    kv: Tensor,
    k_cache: Tensor | None,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return _why_not(kv, fp8=cache_format != "plain")


def q_norm_rope_kv_insert_refuses(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor | None,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    block_size: int,
    cache_format: str,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return _why_not(q, kv, fp8=q_scale is not None or cache_format != "plain")


def _why_not(*vectors: Tensor, fp8: bool) -> str:
    dims = {vector.shape[-1] for vector in vectors}
    if len(dims) > 1:
        return "queries and keys have different dims"
    if any(dim < 2 or dim & (dim - 1) for dim in dims if isinstance(dim, int)):
        return f"the head dim {dims.pop()} is not a power of two"
    return why_unsupported_fp8(vectors[0].device) if fp8 else ""


def _new_heads(q: Tensor, padded_heads: int, q_scale: Tensor | None) -> Tensor:
    tokens, heads, dim = q.shape
    dtype = q.dtype if q_scale is None else torch.float8_e4m3fn
    return q.new_empty((tokens, max(heads, padded_heads), dim), dtype=dtype)


def _tile(rows: int) -> tuple[int, int]:
    """Rows of a program and its warps, by the number of rows in all: few rows spread over all multiprocessors."""
    return (1, 1) if rows <= SPREAD_ROWS else (2, 1)


def _launch(
    out: Tensor | None,
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    block_size: int,
    cache_format: str,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    """Launch for the queries, the keys, or both."""
    tokens, heads, dim = (0, 0, 0) if q is None else q.shape
    out_heads = 0 if out is None else out.shape[1]
    inserted, num_slots = 0, 0
    cache_strides: tuple[int, ...] = (0, 0, 0)
    if kv is not None and k_cache is not None and slot_mapping is not None:
        inserted, dim = slot_mapping.shape[0], kv.shape[1]
        if cache_format == "fp8_ds_mla":
            k_cache = byte_pages(k_cache, cache_format, block_size)
        cache_strides, num_slots = k_cache.stride(), k_cache.shape[0] * block_size
    rows, warps = _tile(tokens * out_heads + inserted)
    programs = cdiv(inserted, rows) + tokens * cdiv(out_heads, rows)
    if programs == 0:
        return
    launch_kernel(
        q_norm_rope_kv_insert_kernel,
        (programs,),
        out,
        k_cache,
        q,
        kv,
        slot_mapping,
        positions,
        cos_sin_cache,
        q_scale,
        kv_scale,
        eps,
        None if q is None else q.stride(),
        None if kv is None else kv.stride(),
        cache_strides,
        None if slot_mapping is None else slot_mapping.stride(0),
        positions.stride(0),
        cos_sin_cache.stride(),
        inserted,
        num_slots,
        cos_sin_cache.shape[0],
        FORMAT=cache_format,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        OUT_HEADS=out_heads,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        ROWS=rows,
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice: another byte now and then.
        enable_fp_fusion=False,
        **pdl_arguments(positions.device, programs),
    )
