"""`cp_gather_indexer_k`: a program copies ROWS gathered keys, and finds the request of each by bisection.

reference/cp_gather_indexer_k.py defines it; every bit is equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAGE_LAYOUTS, byte_pages, cdiv
from ..host.launch import launch_kernel

ROWS_AT_A_TIME = 32


@triton.jit
def _requests_of(p_bounds, bounds_stride, row, bounds, steps):
    """The last of `bounds` ascending numbers that is at most `row` `[N]`, as an index int64; 0 if none is.

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
    p_k,  # [rows, WIDTH]
    p_scale,  # [rows, SCALE_BYTES] uint8
    p_cache,  # pages of WIDTH data bytes and SCALE_BYTES scale bytes a key, or rows [pages, BLOCK_SIZE, WIDTH]
    p_table,  # [table_rows, table_columns] int32
    p_bounds,  # [bounds] int
    k_strides,
    scale_strides,
    cache_strides,  # of a page, a row and a dim; a byte cache has the first alone
    table_strides,
    bounds_stride,
    rows,
    bounds,
    steps,
    pages,
    table_rows,
    table_columns,
    SCALE_BYTES: tl.constexpr,  # 0 for rows
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program p writes rows p * ROWS and on."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    request = _requests_of(p_bounds, bounds_stride, o_row, bounds, steps)
    entry = o_row - tl.load(p_bounds + request * bounds_stride).to(tl.int64)
    end = tl.load(p_bounds + tl.full((), bounds - 1, tl.int64) * bounds_stride).to(tl.int64)
    live = m_row & (o_row < end) & (entry >= 0) & (request < table_rows)
    column = tl.where(live, entry, 0) // BLOCK_SIZE
    live &= column < table_columns
    p_block = p_table + tl.where(live, request, 0) * table_strides[0] + tl.where(live, column, 0) * table_strides[1]
    block = tl.load(p_block, mask=live, other=-1).to(tl.int64)
    live &= (block >= 0) & (block < pages)
    p_page = p_cache + tl.where(live, block, 0) * cache_strides[0]
    place = tl.where(live, entry, 0) % BLOCK_SIZE

    o_dim = tl.arange(0, BLOCK_WIDTH)[None, :]
    m_dim = o_dim < WIDTH
    if SCALE_BYTES > 0:
        p_value = (p_page + place * WIDTH)[:, None] + o_dim
        o_byte = tl.arange(0, SCALE_BYTES)[None, :]
        p_byte = (p_page + BLOCK_SIZE * WIDTH + place * SCALE_BYTES)[:, None] + o_byte
        scale = tl.load(p_byte, mask=live[:, None], other=0)
        p_target = (p_scale + o_row * scale_strides[0])[:, None] + o_byte.to(tl.int64) * scale_strides[1]
        tl.store(p_target, scale, mask=m_row[:, None])
    else:
        p_value = (p_page + place * cache_strides[1])[:, None] + o_dim.to(tl.int64) * cache_strides[2]
    value = tl.load(p_value, mask=live[:, None] & m_dim, other=0)
    p_target = (p_k + o_row * k_strides[0])[:, None] + o_dim.to(tl.int64) * k_strides[1]
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
    """See the reference; every bit is equal."""
    rows, width = k.shape
    if rows == 0 or width == 0:
        return
    page = PAGE_LAYOUTS.get(cache_format)
    cache = byte_pages(k_cache, cache_format, block_size) if page else k_cache
    launch_kernel(
        cp_gather_indexer_k_kernel,
        (cdiv(rows, ROWS_AT_A_TIME),),
        k,
        k_scale,
        cache,
        block_table,
        cu_seq_lens,
        k.stride(),
        k_scale.stride(),
        (*cache.stride(), 0, 0)[:3],
        block_table.stride(),
        cu_seq_lens.stride(0),
        rows,
        cu_seq_lens.shape[0],
        cu_seq_lens.shape[0].bit_length(),
        cache.shape[0],
        block_table.shape[0],
        block_table.shape[1],
        SCALE_BYTES=page.scale if page else 0,
        BLOCK_SIZE=block_size,
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        ROWS=ROWS_AT_A_TIME,
        num_warps=4,
    )
