"""`cp_gather_indexer_k`: a program copies several keys, and finds the request of each by bisection."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAGE_LAYOUTS, byte_pages, cdiv
from ..host.launch import launch_kernel

ROWS_AT_A_TIME = 32


class Shape(NamedTuple):
    """Compile-time sizes of a launch: bytes of a scale (0 for rows), entries of a page, elements of a key, and rows."""

    scale_bytes: int
    block_size: int
    width: int
    block_width: int
    rows: int


class Strides(NamedTuple):
    """Strides of the kernel's arguments; a byte cache has the stride of a page alone."""

    k: tuple[int, ...]
    scale: tuple[int, ...]
    cache: tuple[int, ...]
    table: tuple[int, ...]
    bounds: int


@triton.jit
def _find_requests(p_bounds, bounds_stride, row, bounds, steps):
    """Return the index, int64, of the last of `bounds` ascending numbers that is at most `row` `[N]`; 0 if none is.

    `steps` is the number of bits of `bounds`.
    """
    request = tl.zeros_like(row)
    for step in range(steps):
        candidate = request + (tl.full((), 1, tl.int64) << (steps - 1 - step))
        inside = candidate < bounds
        bound = tl.load(p_bounds + tl.where(inside, candidate, 0) * bounds_stride, mask=inside, other=0).to(tl.int64)
        request = tl.where(inside & (bound <= row), candidate, request)
    return request


@triton.jit(
    do_not_specialize=["rows", "bounds", "steps", "pages", "table_rows", "table_columns"],
    do_not_specialize_on_alignment=["p_bounds", "p_table"],
)
def cp_gather_indexer_k_kernel(
    outputs,  # keys [rows, width] and scales [rows, scale_bytes] uint8
    p_cache,  # pages of data bytes followed by scale bytes, or rows [pages, block_size, width]
    p_table,  # [table_rows, table_columns] int32
    p_bounds,  # [bounds] int
    strides,
    rows,
    bounds,
    steps,  # of the bisection
    pages,
    table_rows,
    table_columns,
    SHAPE: tl.constexpr,
):
    """Write rows p * SHAPE.rows and on in program p."""
    p_k, p_scale = outputs
    SCALE_BYTES: tl.constexpr = SHAPE.scale_bytes
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    WIDTH: tl.constexpr = SHAPE.width
    o_row = tl.program_id(0).to(tl.int64) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    m_row = o_row < rows
    request = _find_requests(p_bounds, strides.bounds, o_row, bounds, steps)
    entry = o_row - tl.load(p_bounds + request * strides.bounds).to(tl.int64)
    end = tl.load(p_bounds + tl.full((), bounds - 1, tl.int64) * strides.bounds).to(tl.int64)
    live = m_row & (o_row < end) & (entry >= 0) & (request < table_rows)
    column = tl.where(live, entry, 0) // BLOCK_SIZE
    live &= column < table_columns
    p_block = p_table + tl.where(live, request, 0) * strides.table[0] + tl.where(live, column, 0) * strides.table[1]
    block = tl.load(p_block, mask=live, other=-1).to(tl.int64)
    live &= (block >= 0) & (block < pages)
    p_page = p_cache + tl.where(live, block, 0) * strides.cache[0]
    place = tl.where(live, entry, 0) % BLOCK_SIZE

    o_dim = tl.arange(0, SHAPE.block_width)[None, :]
    m_dim = o_dim < WIDTH
    if SCALE_BYTES > 0:
        p_value = (p_page + place * WIDTH)[:, None] + o_dim
        o_byte = tl.arange(0, SCALE_BYTES)[None, :]
        p_byte = (p_page + BLOCK_SIZE * WIDTH + place * SCALE_BYTES)[:, None] + o_byte
        scale = tl.load(p_byte, mask=live[:, None], other=0)
        p_target = (p_scale + o_row * strides.scale[0])[:, None] + o_byte.to(tl.int64) * strides.scale[1]
        tl.store(p_target, scale, mask=m_row[:, None])
    else:
        p_value = (p_page + place * strides.cache[1])[:, None] + o_dim.to(tl.int64) * strides.cache[2]
    value = tl.load(p_value, mask=live[:, None] & m_dim, other=0)
    p_target = (p_k + o_row * strides.k[0])[:, None] + o_dim.to(tl.int64) * strides.k[1]
    tl.store(p_target, value, mask=m_row[:, None] & m_dim)


def cp_gather_indexer_k(
    k_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    k: Tensor,
    k_scale: Tensor,
    block_size: int,
    cache_format: str,
) -> None:
    """Launch `cp_gather_indexer_k`; every bit equals the reference."""
    rows, width = k.shape
    if rows == 0 or width == 0:
        return
    page = PAGE_LAYOUTS.get(cache_format)
    cache = byte_pages(k_cache, cache_format, block_size) if page else k_cache
    launch_kernel(
        cp_gather_indexer_k_kernel,
        (cdiv(rows, ROWS_AT_A_TIME),),
        (k, k_scale),
        cache,
        block_table,
        cu_seq_lens,
        Strides(k.stride(), k_scale.stride(), (*cache.stride(), 0, 0)[:3], block_table.stride(), cu_seq_lens.stride(0)),
        rows,
        cu_seq_lens.shape[0],
        cu_seq_lens.shape[0].bit_length(),
        cache.shape[0],
        *block_table.shape,
        SHAPE=Shape(page.scale if page else 0, block_size, width, triton.next_power_of_2(width), ROWS_AT_A_TIME),
        num_warps=4,
    )
