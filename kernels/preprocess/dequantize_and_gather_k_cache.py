"""`dequantize_and_gather_k_cache`: programs split the rows of a request, a few at a time.

Every bit is the reference's. Codes are converted by value, NaN included, because gathered rows need not have been
written by this package.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import FP8_DS_MLA, KV_TILE, NOPE_DIM, PAGE_LAYOUTS, byte_pages, cdiv
from ..attention.common import e4m3_value
from ..device.quant import MANTISSA_BITS, SUBNORMAL_HALF
from ..host.addresses import first_byte
from ..host.launch import launch_kernel

ROWS_AT_A_TIME = tl.constexpr(8)
PROGRAMS = 1024
"""Programs that fill a GPU."""
DATA_BYTES, SCALE_BYTES = tl.constexpr(FP8_DS_MLA.data), tl.constexpr(FP8_DS_MLA.scale)
TILE, NOPE = tl.constexpr(KV_TILE), tl.constexpr(NOPE_DIM)
NAN_BYTE, NAN_BITS = tl.constexpr(255), tl.constexpr(0x7FC00000)


@triton.jit
def ue8m0_value(byte):
    """Return the float32 value of uint8 UE8M0: 2^(byte - 127)."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, SUBNORMAL_HALF, tl.where(byte == NAN_BYTE, NAN_BITS, byte << MANTISSA_BITS))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_mla_rows(p_page, offset, live, BLOCK_SIZE: tl.constexpr):
    """Load and dequantise `fp8_ds_mla` rows: bfloat16 `[ROWS, 512]`, zero where not `live`."""
    ROWS: tl.constexpr = offset.shape[0]
    o_tile, o_dim = tl.arange(0, SCALE_BYTES)[None, :], tl.arange(0, TILE)
    m_tile = live[:, None] & (o_tile < NOPE // TILE)
    p_row = p_page + offset * DATA_BYTES
    p_scale = (p_page + BLOCK_SIZE * DATA_BYTES + offset * SCALE_BYTES)[:, None] + o_tile
    # [ROWS, 8, 64]; the last tile is the rotated dims, which are stored unquantised.
    p_code = p_row[:, None, None] + (o_tile * TILE)[:, :, None] + o_dim[None, None, :]
    code = tl.load(p_code, mask=m_tile[:, :, None], other=0)
    scale = ue8m0_value(tl.load(p_scale, mask=m_tile, other=0))
    p_rope = (p_row + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + o_dim[None, :]
    rope = tl.load(p_rope, mask=live[:, None], other=0.0)
    values = (e4m3_value(code) * scale[:, :, None]).to(tl.bfloat16)
    values = tl.where((o_tile == NOPE // TILE)[:, :, None], tl.expand_dims(rope, 1), values)
    return tl.reshape(values, (ROWS, SCALE_BYTES * TILE))


class Strides(NamedTuple):
    """Strides of the result, of a page, row and dim of the cache, of both lengths, and of the block table."""

    out: tuple[int, ...]
    cache: tuple[int, ...]
    lens: tuple[int, int]
    table: tuple[int, ...]


class Shape(NamedTuple):
    """Compile-time sizes: format and rows of a page, dims of a row, and the power of two that holds them."""

    fmt: str
    block_size: int
    dim: int
    block_d: int


@triton.jit(
    do_not_specialize=["rows", "offset", "pages", "columns"],
    do_not_specialize_on_alignment=["p_seq_lens", "p_gather_lens", "p_table", "p_kv_scale"],
)
def gather_k_cache_kernel(
    tensors,  # result [B, >= offset + rows, dim], and pages in SHAPE.fmt
    p_seq_lens,  # [B] int32
    p_gather_lens,  # [B] int32
    p_table,  # [B, columns] int32
    p_kv_scale,  # [1] float32 or None
    strides,
    rows,
    offset,
    pages,
    columns,
    SHAPE: tl.constexpr,
):
    """Copy every S-th tile of ROWS rows of request b, from tile s on, in program (b, s) of (B, S)."""
    p_out, p_cache = tensors
    out_strides, cache_strides, lens_strides, table_strides = strides
    FORMAT: tl.constexpr = SHAPE.fmt
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    D: tl.constexpr = SHAPE.dim
    ROWS: tl.constexpr = ROWS_AT_A_TIME
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(p_seq_lens + request * lens_strides[0])
    gathered = tl.load(p_gather_lens + request * lens_strides[1])
    # As int32, like the lengths.
    oldest = (seq_len - gathered).to(tl.int64)
    p_blocks = p_table + request * table_strides[0]
    p_first = p_out + request * out_strides[0] + tl.full((), offset, tl.int64) * out_strides[1]
    o_dim = tl.arange(0, SHAPE.block_d)[None, :]
    count = tl.minimum(gathered, rows)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        o_row = start + tl.arange(0, ROWS)
        entry = oldest + o_row
        live = (o_row < count) & (entry >= 0)
        column = tl.where(live, entry, 0) // BLOCK_SIZE
        live &= column < columns
        block = tl.load(p_blocks + tl.where(live, column, 0) * table_strides[1], mask=live, other=-1).to(tl.int64)
        live &= (block >= 0) & (block < pages)
        p_page = p_cache + tl.where(live, block, 0) * cache_strides[0]
        place = tl.where(live, entry, 0) % BLOCK_SIZE
        if FORMAT == "fp8_ds_mla":
            values = load_mla_rows(p_page, place, live, BLOCK_SIZE)
        else:
            p_value = (p_page + place * cache_strides[1])[:, None] + o_dim.to(tl.int64) * cache_strides[2]
            values = tl.load(p_value, mask=live[:, None] & (o_dim < D), other=0)
            if FORMAT == "fp8":
                values = e4m3_value(values)
                values = (values if p_kv_scale is None else values * tl.load(p_kv_scale)).to(tl.bfloat16)
        p_row = (p_first + o_row.to(tl.int64) * out_strides[1])[:, None] + o_dim.to(tl.int64) * out_strides[2]
        values = values.to(tl.float32).to(p_out.dtype.element_ty)
        tl.store(p_row, values, mask=(o_row < count)[:, None] & (o_dim < D))


def why_unsupported_dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    if cache_format in PAGE_LAYOUTS and (k_cache.stride(0) % 2 or first_byte(k_cache) % 2):
        return "a page starts at an odd byte, so that its bfloat16 dims are not aligned"
    return ""


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
) -> None:
    """Write the same bits as the reference."""
    gather_lens = seq_lens if gather_lens is None else gather_lens
    requests, rows, head_dim = out.shape[0], out.shape[1] - offset, out.shape[2]
    if requests == 0 or rows <= 0 or head_dim == 0:
        return
    cache = byte_pages(k_cache, cache_format, block_size) if cache_format in PAGE_LAYOUTS else k_cache
    programs = min(cdiv(rows, ROWS_AT_A_TIME.value), cdiv(PROGRAMS, requests))
    lens = seq_lens.stride(0), gather_lens.stride(0)
    # A cache of bytes has no strides of rows and dims.
    strides = Strides(out.stride(), (*cache.stride(), 0, 0)[:3], lens, block_table.stride())
    launch_kernel(
        gather_k_cache_kernel,
        (requests, programs),
        (out, cache),
        seq_lens,
        gather_lens,
        block_table,
        kv_scale,
        strides,
        rows,
        offset,
        cache.shape[0],
        block_table.shape[1],
        SHAPE=Shape(cache_format, block_size, head_dim, triton.next_power_of_2(head_dim)),
        num_warps=4,
    )
