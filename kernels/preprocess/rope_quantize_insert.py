"""`rope_quantize_insert`: each program rotates, rounds and stores a few rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import GRIDS, byte_pages, cdiv, page_layout
from ..device.barriers import scheduling_fence
from ..device.grid_format import dequantize, quantize
from ..device.kv_format import store_kv
from ..device.quant import why_unsupported_fp8
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .kv_rope_insert import Strides, why_unsupported_dim

SPREAD_ROWS = 1536
"""Most rows with one program each: few rows spread over all SMs."""


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        fmt, block_size: format and rows of a page. grid: that plain rows are rounded to, or "".
        rows: of a program. dim, rope: channels, and how many are rotated.
        data, scale: bytes of a row in a format of `GRIDS`.
    """

    fmt: str
    grid: str
    block_size: int
    rows: int
    dim: int
    rope: int
    data: int
    scale: int


@triton.jit(
    do_not_specialize=["tokens", "num_slots", "max_pos"],
    do_not_specialize_on_alignment=["p_slots", "p_positions"],
)
def rope_quantize_insert_kernel(
    p_cache,  # pages in SHAPE.fmt
    p_x,  # [tokens, dim]
    p_slots,  # [tokens] int
    p_positions,  # [tokens] int
    p_table,  # [max_pos, rope] float32
    strides,
    tokens,
    num_slots,
    max_pos,
    SHAPE: tl.constexpr,  # `Shape`
    PDL: tl.constexpr,
):
    """Insert rows [p * rows, (p + 1) * rows) in program p."""
    pdl_prologue(PDL)
    D: tl.constexpr = SHAPE.dim
    token = tl.program_id(0).to(tl.int64) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    exists = token < tokens
    # Slot, position and row are loaded side by side, also for tokens without a slot: their results are not stored, and
    # a single token waits for two loads instead of four.
    slot = tl.load(p_slots + token * strides.slots, mask=exists, other=-1).to(tl.int64)
    row = table_row(tl.load(p_positions + token * strides.positions, mask=exists, other=0), max_pos)
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    x = tl.load(p_x + token[:, None] * strides.kv[0] + o_d * strides.kv[1], mask=exists[:, None], other=0.0)
    scheduling_fence(p_x)
    cos, sin = load_cos_sin(p_table + row[:, None] * strides.table[0], strides.table[1], exists[:, None], D, SHAPE.rope)
    # Rotated rows are rounded to the dtype of x before they are rounded to a grid.
    rotated = rotate(x.to(tl.float32), cos, sin, SHAPE.rope).to(x.dtype).to(tl.float32)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    store_row_format(p_cache, strides.cache, slot, live, rotated, SHAPE)


@triton.jit
def store_row_format(p_cache, strides, slot, live, x, SHAPE: tl.constexpr):
    """Store float32 `x` `[N, D]` at int64 `slot` `[N]`, all in range, for the rows of bool `live` `[N]`."""
    FORMAT: tl.constexpr = SHAPE.fmt
    GRID: tl.constexpr = SHAPE.grid
    if SHAPE.data > 0:
        data, scale = quantize(x, FORMAT)
        p_page, offset = p_cache + slot // SHAPE.block_size * strides[0], slot % SHAPE.block_size
        # Byte by byte: pages may have any alignment.
        p_data = (p_page + offset * SHAPE.data)[:, None] + tl.arange(0, SHAPE.data)[None, :]
        tl.store(p_data, data, mask=live[:, None])
        p_scale = (p_page + SHAPE.block_size * SHAPE.data + offset * SHAPE.scale)[:, None]
        tl.store(p_scale + tl.arange(0, SHAPE.scale)[None, :], scale, mask=live[:, None])
    else:
        if GRID != "":
            data, scale = quantize(x, GRID)
            x = dequantize(data, scale, GRID).to(tl.float32)
        store_kv(p_cache, strides, slot, live, x, None, FORMAT, SHAPE.block_size)


def tile(rows: int) -> tuple[int, int]:
    """Return the rows of a program and its warps for so many rows in all."""
    return (1, 1) if rows <= SPREAD_ROWS else (2, 1)


def rope_quantize_insert(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    grid: str = "",
) -> None:
    """Store the same bytes as the reference."""
    tokens, dim = x.shape
    rows, warps = tile(tokens)
    programs = cdiv(tokens, rows)
    if programs == 0:
        return
    page = page_layout(cache_format, dim)
    pages = cache if page is None else byte_pages(cache, cache_format, block_size, head_dim=dim)
    data, scale = (page.data, page.scale) if page is not None and cache_format in GRIDS else (0, 0)
    launch_kernel(
        rope_quantize_insert_kernel,
        (programs,),
        pages,
        x,
        slots,
        positions,
        cos_sin_cache,
        Strides(x.stride(), pages.stride(), slots.stride(0), positions.stride(0), cos_sin_cache.stride()),
        tokens,
        pages.shape[0] * block_size,
        cos_sin_cache.shape[0],
        SHAPE=Shape(cache_format, grid, block_size, rows, dim, cos_sin_cache.shape[1], data, scale),
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice: bytes would differ now and then.
        enable_fp_fusion=False,
        **pdl_arguments(positions.device, programs),
    )


def why_unsupported_rope_quantize_insert(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    grid: str = "",
) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    # Scales of nvfp4 are e4m3, too.
    eight_bits = cache_format in ("mxfp8", "nvfp4", "fp8_ds_mla") or grid in ("mxfp8", "nvfp4")
    return why_unsupported_dim(x.shape[1]) or (why_unsupported_fp8(x.device) if eight_bits else "")
