"""Stores of key/value rows into a paged cache, in the bytes that the reference (common/kv_format.py) writes."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import FP8_DS_MLA
from ...layout import KV_AMAX_FLOOR as _KV_AMAX_FLOOR
from ...layout import KV_TILE as _KV_TILE
from ...layout import NOPE_DIM as _NOPE_DIM
from .quant import FP8_MAX, e4m3, inverse_of, tile_byte, ue8m0_inverse

KV_AMAX_FLOOR = tl.constexpr(_KV_AMAX_FLOOR)
KV_TILE = tl.constexpr(_KV_TILE)
NOPE = tl.constexpr(_NOPE_DIM)
DATA_BYTES = tl.constexpr(FP8_DS_MLA.data)
SCALE_BYTES = tl.constexpr(FP8_DS_MLA.scale)


@triton.jit
def store_kv(p_cache, strides, slot, live, x, p_kv_scale, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Store float32 `x` `[N, D]` at int64 `slot` `[N]` for the rows of bool `live` `[N]`.

    Every slot is in range, also of rows that are not live. `strides` are the cache's: page, and for row formats token
    and dim. `p_kv_scale` is None or points to one float32.
    """
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if FORMAT == "fp8_ds_mla":
        store_mla_rows(p_cache + block * strides[0], offset, live, x.to(tl.bfloat16), BLOCK_SIZE)
    else:
        o_d = tl.arange(0, x.shape[1])[None, :].to(tl.int64)
        p_row = p_cache + (block * strides[0] + offset * strides[1])[:, None] + o_d * strides[2]
        if FORMAT == "fp8":
            if p_kv_scale is not None:
                x = x * inverse_of(p_kv_scale)
            tl.store(p_row, e4m3(x).to(tl.uint8, bitcast=True), mask=live[:, None])
        else:
            tl.store(p_row, x.to(p_cache.dtype.element_ty), mask=live[:, None])


@triton.jit
def store_mla_rows(p_page, offset, live, x, BLOCK_SIZE: tl.constexpr):
    """Store bfloat16 `x` `[N, D]` as `fp8_ds_mla` rows, byte by byte: pages may have any alignment."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    p_data, m_row = p_page + offset * DATA_BYTES, live[:, None]
    o_tile = tl.arange(0, SCALE_BYTES)[None, :]
    # [N, tiles, KV_TILE]; the last tile is the RoPE dims, which have no scale.
    tiles = tl.reshape(x.to(tl.float32), (N, D // KV_TILE, KV_TILE))
    byte = tile_byte(tiles, KV_AMAX_FLOOR, FP8_MAX)
    values = e4m3(tiles * ue8m0_inverse(byte)[:, :, None]).to(tl.uint8, bitcast=True)
    o_value = (o_tile * KV_TILE)[:, :, None] + tl.arange(0, KV_TILE)[None, None, :]
    tl.store(p_data[:, None, None] + o_value, values, mask=live[:, None, None] & (o_value < NOPE))

    bits = x.to(tl.uint16, bitcast=True)
    halves = tl.reshape(tl.join((bits & 0xFF).to(tl.uint8), (bits >> 8).to(tl.uint8)), (N, 2 * D))
    o_byte = tl.arange(0, 2 * D)[None, :]
    tl.store(p_data[:, None] + (o_byte - NOPE), halves, mask=m_row & (o_byte >= 2 * NOPE))

    scale = tl.where(o_tile < NOPE // KV_TILE, byte, 0).to(tl.uint8)
    tl.store((p_page + BLOCK_SIZE * DATA_BYTES + offset * SCALE_BYTES)[:, None] + o_tile, scale, mask=m_row)
