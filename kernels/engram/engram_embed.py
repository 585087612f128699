"""`engram_embed`: a program copies several rows of a table, and dequantises them bit for bit as the reference does."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import MX_TILE, cdiv
from ..device.grid_format import e4m3_value
from ..device.quant import ue8m0_scale
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

ROWS, ELEMENTS = 8, 4096
"""Most rows of a program, and most elements if they are more than one."""
MAX_CHANNELS = 16384
TILE = tl.constexpr(MX_TILE)


class Shape(NamedTuple):
    """Compile-time sizes of a launch: rows of a token and of a program, channels of a row, and these padded."""

    k: int
    rows: int
    channels: int
    block: int
    quantised: bool


@triton.jit(do_not_specialize=["total", "table_rows"], do_not_specialize_on_alignment=["p_rows"])
def engram_embed_kernel(
    p_out,  # [T * K, C] float32, contiguous
    p_rows,  # [T, K] int
    p_table,  # [table_rows, C], e4m3 as uint8
    p_scale,  # [table_rows, C / 32] uint8, for e4m3
    strides,  # of rows, table and scale
    total,  # T * K
    table_rows,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write rows [p * ROWS, (p + 1) * ROWS) of the result in program p."""
    pdl_prologue(PDL)
    row_strides, table_strides, scale_strides = strides
    C: tl.constexpr = SHAPE.channels
    BLOCK: tl.constexpr = SHAPE.block
    ROWS: tl.constexpr = SHAPE.rows
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = item < total
    row = tl.load(p_rows + item // SHAPE.k * row_strides[0] + item % SHAPE.k * row_strides[1], mask=live, other=-1)
    row = row.to(tl.int64)
    known = (row >= 0) & (row < table_rows)
    row = tl.where(known, row, 0)[:, None]
    o_c = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    m_x = known[:, None] & (o_c < C)
    x = tl.load(p_table + row * table_strides[0] + o_c * table_strides[1], mask=m_x, other=0)
    if SHAPE.quantised:
        scale = tl.load(p_scale + row * scale_strides[0] + o_c // TILE * scale_strides[1], mask=m_x, other=0)
        x = e4m3_value(x) * ue8m0_scale(scale.to(tl.int32))
    tl.store(p_out + item[:, None] * C + o_c, x.to(tl.float32), mask=live[:, None] & (o_c < C))


def engram_embed(rows: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
    """Launch `engram_embed`; every bit equals the reference."""
    (tokens, count), (entries, channels) = rows.shape, table.shape
    out = table.new_empty((tokens, count * channels), dtype=torch.float32)
    if out.numel() == 0:
        return out
    quantised = scale is not None
    data = table.view(torch.uint8) if quantised else table
    scales = data if scale is None else scale.view(torch.uint8)
    block = triton.next_power_of_2(channels)
    of_program = max(1, min(ROWS, ELEMENTS // block))
    programs = cdiv(tokens * count, of_program)
    launch_kernel(
        engram_embed_kernel,
        (programs,),
        out,
        rows,
        data,
        scales,
        (rows.stride(), data.stride(), scales.stride()),
        tokens * count,
        entries,
        SHAPE=Shape(count, of_program, channels, block, quantised),
        num_warps=4,
        **pdl_arguments(rows.device, programs),
    )
    return out


def why_unsupported_engram_embed(rows: Tensor, table: Tensor, scale: Tensor | None = None) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    channels = table.shape[1]
    if isinstance(channels, int) and channels > MAX_CHANNELS:
        return f"{channels} channels, the kernel takes up to {MAX_CHANNELS}"
    return ""
