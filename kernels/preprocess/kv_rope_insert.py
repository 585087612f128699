"""`kv_rope_insert`: each program rotates and stores a few rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import byte_pages, cdiv
from ..device.quant import why_unsupported_fp8
from ..device.rope import Rope
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .insert_rows import Insert, InsertShape, insert_rows

SPREAD_ROWS = 1536
"""Most rows with one program each: few rows spread over all SMs."""


class Strides(NamedTuple):
    """Strides of the tensors of a launch."""

    kv: tuple[int, ...]
    cache: tuple[int, ...]
    slots: int
    positions: int
    table: tuple[int, ...]


@triton.jit(
    do_not_specialize=["inserted", "num_slots", "max_pos"],
    do_not_specialize_on_alignment=["p_slots", "p_positions", "p_kv_scale"],
)
def kv_rope_insert_kernel(
    p_cache,  # pages in SHAPE.fmt
    p_kv,  # [>= inserted, dim]
    p_slots,  # [inserted] int
    p_positions,  # [>= inserted] int
    p_table,  # [max_pos, rope] float32
    p_kv_scale,  # [1] float32 or None
    _eps,  # unused: without it the machine code would differ from the proven one
    strides,
    inserted,
    num_slots,
    max_pos,
    SHAPE: tl.constexpr,  # `InsertShape`
    PDL: tl.constexpr,
):
    """Insert rows [p * rows, (p + 1) * rows) in program p."""
    pdl_prologue(PDL)
    program = tl.program_id(0)
    # A single row of a program then exists without a mask.
    tl.assume(program < tl.cdiv(inserted, SHAPE.rows))
    insert = Insert(p_cache, strides.cache, p_kv, strides.kv, p_slots, strides.slots, p_kv_scale, inserted, num_slots)
    rope = Rope(p_positions, strides.positions, p_table, strides.table, max_pos)
    insert_rows(program, insert, None, rope, SHAPE)


def pages_of(k_cache: Tensor, cache_format: str, block_size: int) -> Tensor:
    """Return the cache as kernels take it: `fp8_ds_mla` as bytes `[P, page_bytes]`."""
    return byte_pages(k_cache, cache_format, block_size) if cache_format == "fp8_ds_mla" else k_cache


def tile(rows: int) -> tuple[int, int]:
    """Return the rows of a program and its warps for so many rows in all."""
    return (1, 1) if rows <= SPREAD_ROWS else (2, 1)


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
    """Store the same bytes as the reference."""
    inserted = slot_mapping.shape[0]
    rows, warps = tile(inserted)
    programs = cdiv(inserted, rows)
    if programs == 0:
        return
    pages = pages_of(k_cache, cache_format, block_size)
    launch_kernel(
        kv_rope_insert_kernel,
        (programs,),
        pages,
        kv,
        slot_mapping,
        positions,
        cos_sin_cache,
        kv_scale,
        0.0,
        Strides(kv.stride(), pages.stride(), slot_mapping.stride(0), positions.stride(0), cos_sin_cache.stride()),
        inserted,
        pages.shape[0] * block_size,
        cos_sin_cache.shape[0],
        SHAPE=InsertShape(cache_format, block_size, rows, kv.shape[1], cos_sin_cache.shape[1]),
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice: bytes would differ now and then.
        enable_fp_fusion=False,
        **pdl_arguments(positions.device, programs),
    )


def why_unsupported_kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor | None,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    return why_unsupported_dim(kv.shape[1]) or (why_unsupported_fp8(kv.device) if cache_format != "plain" else "")


def why_unsupported_dim(dim: int) -> str:
    """Return why kernels do not support vectors of `dim` elements, "" if they do."""
    if isinstance(dim, int) and (dim < 2 or dim & (dim - 1)):
        return f"the head dim {dim} is not a power of two of at least 2"
    return ""
