"""`compress_norm_rope_insert`: one program pools, normalises, rotates and stores the entry that one token closes.

A program for any other token leaves at once. Each lane of the window tile walks every ROWS-th position with a softmax
of its own, and the lanes are merged behind the loop: nothing is exchanged between threads while states are read.
reference/compress_norm_rope_insert.py defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import INDEXER_FP8, INDEXER_MXFP4, PAGE_LAYOUTS, byte_pages, overlap_factor
from .hadamard import HADAMARD_DIMS, HADAMARD_ROWS, rounded_hadamard
from .indexer_format import quantize_fp8, quantize_mxfp4
from .kv_format import store_mla_rows
from .quant import e4m3, inverse_of, refuses_fp8
from .rope import load_cos_sin, rotate, table_row

MAX_ROWS = 16
"""Positions of a window that are read at a time: 64 KiB of states for d = 512."""
FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HADAMARD_TILE = tl.constexpr(HADAMARD_ROWS)


@triton.jit
def _pool(
    p_state, p_table_row, position, state_strides, table_stride, state_pages, table_columns,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """float32 `[D]`: per channel, the softmax-weighted sum of the window that ends at `position`."""
    WINDOW: tl.constexpr = GROUPS * RATIO
    o_d = tl.arange(0, D)[None, :]
    # [ROWS, D]: largest score so far, sum of weights and of weighted values. A finite start keeps -inf - -inf away.
    top = tl.full((ROWS, D), LOWEST, tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    pooled = tl.zeros((ROWS, D), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, WINDOW, ROWS):
        back = start + tl.arange(0, ROWS)
        logical = position - (WINDOW - 1) + back
        present = (logical >= 0) & (back < WINDOW)
        logical = tl.where(present, logical, 0)
        column = logical // STATE_BLOCK
        present &= column < table_columns
        block = tl.load(p_table_row + tl.where(present, column, 0) * table_stride, mask=present, other=-1).to(tl.int64)
        present &= (block >= 0) & (block < state_pages)
        offset = tl.where(present, block, 0) * state_strides[0] + (logical % STATE_BLOCK) * state_strides[1]
        # The last group of positions has the last columns to itself, the one before it the first.
        channel = tl.where(back >= WINDOW - RATIO, (GROUPS - 1) * D, 0)[:, None] + o_d.to(tl.int64)
        p_value = p_state + offset[:, None] + channel * state_strides[2]
        value = tl.load(p_value, mask=present[:, None], other=0.0)
        score = tl.load(p_value + (GROUPS * D) * state_strides[2], mask=present[:, None], other=float("-inf"))

        above = score > top
        # One exponential serves both the old sums and the new weight: the larger of the two scores weighs 1.
        ratio = tl.exp(-tl.abs(score - top))
        weight = tl.where(above, 1.0, ratio)
        keep = tl.where(above, ratio, 1.0)
        total = total * keep + weight
        pooled = pooled * keep + weight * value
        top = tl.where(above, score, top)
        count += present.to(tl.int32)
    keep = tl.exp(top - tl.max(top, axis=0)[None, :])
    pooled = tl.sum(pooled * keep, axis=0) / tl.sum(total * keep, axis=0)
    return tl.where(tl.sum(count, axis=0) > 0, pooled, 0.0)


@triton.jit
def _store_entry(p_cache, slot, x, p_kv_scale, cache_strides, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Store the float32 entry `x` `[1, D]` at a legal slot."""
    D: tl.constexpr = x.shape[1]
    o_d = tl.arange(0, D)[None, :]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    p_page = p_cache + block * cache_strides[0]
    if FORMAT == "fp8_ds_mla":
        one = tl.zeros((1,), tl.int64)
        store_mla_rows(p_page + one, offset + one, one == 0, x.to(tl.bfloat16), BLOCK_SIZE)
    elif FORMAT == "indexer_fp8":
        values, scale = quantize_fp8(x.to(tl.bfloat16).to(tl.float32))
        tl.store(p_page + offset * FP8_DATA + o_d, values)
        o_byte = tl.arange(0, FP8_SCALE)[None, :]
        # Byte by byte: a page may begin anywhere.
        scale_bytes = (scale.to(tl.int32, bitcast=True)[:, None] >> (8 * o_byte)).to(tl.uint8)
        tl.store(p_page + BLOCK_SIZE * FP8_DATA + offset * FP8_SCALE + o_byte, scale_bytes)
    elif FORMAT == "indexer_mxfp4":
        values, scale = quantize_mxfp4(x.to(tl.bfloat16).to(tl.float32))
        tl.store(p_page + offset * MXFP4_DATA + tl.arange(0, MXFP4_DATA)[None, :], values)
        p_scale = p_page + BLOCK_SIZE * MXFP4_DATA + offset * MXFP4_SCALE
        tl.store(p_scale + tl.arange(0, MXFP4_SCALE)[None, :], scale)
    else:
        p_row = p_page + offset * cache_strides[1] + o_d.to(tl.int64) * cache_strides[2]
        if FORMAT == "fp8":
            if p_kv_scale is not None:
                x = x * inverse_of(p_kv_scale)
            tl.store(p_row, e4m3(x).to(tl.uint8, bitcast=True))
        else:
            tl.store(p_row, x.to(p_cache.dtype.element_ty))


@triton.jit(
    do_not_specialize=["state_pages", "num_slots", "table_rows", "table_columns", "max_pos"],
    do_not_specialize_on_alignment=["p_state_slots", "p_table", "p_requests", "p_positions", "p_slots", "p_kv_scale"],
)
def compress_norm_rope_insert_kernel(
    p_cache,  # pages in FORMAT
    p_state,  # [state_pages, STATE_BLOCK, 2 * GROUPS * D] float32
    p_state_slots,  # [T] int64
    p_table,  # [table_rows, table_columns] int32
    p_requests,  # [>= T] int
    p_positions,  # [>= T] int
    p_slots,  # [>= T] int64
    p_weight,  # [D]
    p_cos_sin,  # [max_pos, ROPE] float32
    p_kv_scale,  # [1] float32 or None
    eps,
    cache_strides,
    state_strides,
    table_strides,
    token_strides,  # of state slots, requests, positions, slots
    weight_stride,
    cos_sin_strides,
    state_pages,
    num_slots,
    table_rows,
    table_columns,
    max_pos,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    GROUPS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Program p takes token p."""
    token = tl.program_id(0).to(tl.int64)
    state_slot = tl.load(p_state_slots + token * token_strides[0])
    position = tl.load(p_positions + token * token_strides[2]).to(tl.int64)
    slot = tl.load(p_slots + token * token_strides[3])
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    saved = (state_slot >= 0) & (state_slot // STATE_BLOCK < state_pages)
    if closes & saved & (slot >= 0) & (slot < num_slots):
        request = tl.load(p_requests + token * token_strides[1]).to(tl.int64)
        known = (request >= 0) & (request < table_rows)
        p_row = p_table + tl.where(known, request, 0) * table_strides[0]
        # [1, D]
        x = _pool(
            p_state, p_row, position, state_strides, table_strides[1], state_pages, tl.where(known, table_columns, 0),
            RATIO, GROUPS, STATE_BLOCK, ROWS, D,
        )[None, :]  # fmt: skip
        weight = tl.load(p_weight + tl.arange(0, D)[None, :].to(tl.int64) * weight_stride).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * weight
        row = table_row(position // RATIO * RATIO, max_pos)
        cos, sin = load_cos_sin(p_cos_sin + row * cos_sin_strides[0], cos_sin_strides[1], True, D, ROPE)
        x = rotate(x, cos, sin, ROPE)
        if HADAMARD:
            DTYPE: tl.constexpr = p_cache.dtype.element_ty if FORMAT == "plain" else tl.bfloat16
            tile = tl.broadcast_to(x, (HADAMARD_TILE, D))
            first = tl.arange(0, HADAMARD_TILE)[:, None] == 0
            x = tl.sum(tl.where(first, rounded_hadamard(tile, DTYPE), 0.0), axis=0)[None, :]
        _store_entry(p_cache, slot, x, p_kv_scale, cache_strides, FORMAT, BLOCK_SIZE)


def tile_of(ratio: int, dim: int) -> tuple[int, int]:
    """Positions that a program reads at a time and its warps."""
    rows = min(triton.next_power_of_2(overlap_factor(ratio) * ratio), MAX_ROWS)
    return rows, min(16, max(4, rows * dim // 512))


def compress_norm_rope_insert_refuses(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor | None,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    dim = norm_weight.shape[0]
    if dim < 2 or dim & (dim - 1):
        return f"entries of {dim} dims, which is not a power of two"
    if hadamard and dim not in HADAMARD_DIMS:
        return f"a Hadamard transform of {dim} dims, built for {HADAMARD_DIMS}"
    return refuses_fp8(state_cache.device) if cache_format in ("fp8_ds_mla", "fp8", "indexer_fp8") else ""


def compress_norm_rope_insert(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
    *,
    tile: tuple[int, int] | None = None,
) -> None:
    """See the reference.

    Pooled values differ from it by the order of their sums, so a stored value next to a rounding boundary may be the
    neighbour. All that follows the RMS norm rounds as it does, and results do not depend on the batch.
    `tile` overrides the choice of `tile_of`.
    """
    tokens = state_slot_mapping.shape[0]
    if tokens == 0:
        return
    rows, warps = tile or tile_of(ratio, norm_weight.shape[0])
    pages = byte_pages(k_cache, cache_format, block_size) if cache_format in PAGE_LAYOUTS else k_cache
    per_token = (state_slot_mapping, token_to_req, positions, slot_mapping)
    compress_norm_rope_insert_kernel[(tokens,)](
        pages,
        state_cache,
        state_slot_mapping,
        state_block_table,
        token_to_req,
        positions,
        slot_mapping,
        norm_weight,
        cos_sin_cache,
        kv_scale,
        eps,
        pages.stride(),
        state_cache.stride(),
        state_block_table.stride(),
        tuple(value.stride(0) for value in per_token),
        norm_weight.stride(0),
        cos_sin_cache.stride(),
        state_cache.shape[0],
        pages.shape[0] * block_size,
        state_block_table.shape[0],
        state_block_table.shape[1],
        cos_sin_cache.shape[0],
        FORMAT=cache_format,
        BLOCK_SIZE=block_size,
        STATE_BLOCK=state_block_size,
        RATIO=ratio,
        GROUPS=overlap_factor(ratio),
        HADAMARD=hadamard,
        ROWS=rows,
        D=norm_weight.shape[0],
        ROPE=cos_sin_cache.shape[1],
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
    )
