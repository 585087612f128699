"""Device functions that pool, normalise, rotate and store the entries that tokens close.

A program holds a whole window of some channels in registers. reference/compress_norm_rope_insert.py defines the result.

States may be pooled in the launch that saves them. Then no program waits for another: those that this step writes are
taken from its projection, the others from the cache. Channels are pooled each by itself, so several programs may share
an entry; its norm needs them all, and the last program to arrive takes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import INDEXER_FP8, INDEXER_MXFP4
from .arrivals import arrive
from .hadamard import HADAMARD_ROWS, rounded_hadamard
from .indexer_format import quantize_fp8, quantize_mxfp4
from .kv_format import store_kv
from .norm import load_weight, normed
from .rope import load_cos_sin, rotate, table_row

FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HADAMARD_TILE = tl.constexpr(HADAMARD_ROWS)


@triton.jit
def _pool(
    token, position, p_state, p_kv_score, p_ape, p_state_slots, p_table_row, state_strides, kv_score_strides,
    ape_strides, state_slot_stride, table_stride, state_pages, table_columns, first,
    COLUMNS: tl.constexpr, RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """float32 `[1, COLUMNS]`: of the channels from `first` on, the softmax-weighted sum of the window that ends at
    `position`, that of `token`, which closes a group.

    With a kv_score, the state of the token k rows before is that token's row of kv_score, if the slot that it is
    saved at is the slot where the table has the position.
    """
    WINDOW: tl.constexpr = GROUPS * RATIO
    SCORES: tl.constexpr = GROUPS * D
    # Every thread knows all rows, so what is done for a row is done in 32 bits where that is enough.
    back = tl.arange(0, ROWS)
    logical = position.to(tl.int32) - (WINDOW - 1) + back
    present = (logical >= 0) & (back < WINDOW)
    logical = tl.where(present, logical, 0).to(tl.uint32)
    column, place = (logical // STATE_BLOCK).to(tl.int32), (logical % STATE_BLOCK).to(tl.int32)
    present &= column < table_columns
    block = tl.load(p_table_row + tl.where(present, column, 0) * table_stride, mask=present, other=-1).to(tl.int32)
    if p_kv_score is not None:
        fresh = present & (token - (WINDOW - 1) + back >= 0)
        p_saved_at = p_state_slots + token * state_slot_stride + (back - (WINDOW - 1)) * state_slot_stride
        saved_at = tl.load(p_saved_at, mask=fresh, other=-1)
    present &= (block >= 0) & (block < state_pages)
    block = tl.where(present, block, 0).to(tl.int64)
    cached = present
    # [ROWS, COLUMNS]. The last group of positions has the last columns to itself, the one before it the first.
    channel = tl.where(back >= WINDOW - RATIO, (GROUPS - 1) * D, 0)[:, None] + (first + tl.arange(0, COLUMNS))[None, :]
    p_value = (p_state + block * state_strides[0] + place * state_strides[1])[:, None] + channel * state_strides[2]
    if p_kv_score is not None:
        fresh &= present & (saved_at == block * STATE_BLOCK + place)
        cached = present & ~fresh
        # Groups begin with the window.
        p_bias = p_ape + (back % RATIO * ape_strides[0])[:, None] + channel * ape_strides[1]
        bias = tl.load(p_bias, mask=fresh[:, None], other=0.0).to(tl.float32)
    value = tl.load(p_value, mask=cached[:, None], other=0.0)
    score = tl.load(p_value + SCORES * state_strides[2], mask=cached[:, None], other=float("-inf"))
    if p_kv_score is not None:
        p_row = p_kv_score + token * kv_score_strides[0] + (back - (WINDOW - 1)) * kv_score_strides[0]
        p_value = p_row[:, None] + channel * kv_score_strides[1]
        value = tl.load(p_value, mask=fresh[:, None], other=value)
        score = tl.load(p_value + SCORES * kv_score_strides[1], mask=fresh[:, None], other=score) + bias
    # A finite top keeps -inf - -inf away.
    weight = tl.exp(score - tl.maximum(tl.max(score, axis=0), LOWEST)[None, :])
    pooled = tl.sum(weight * value, axis=0) / tl.sum(weight, axis=0)
    return tl.where(tl.max(present.to(tl.int32), axis=0) > 0, pooled, 0.0)[None, :]


@triton.jit
def _store_entry(p_cache, slot, x, p_kv_scale, cache_strides, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Store the float32 entry `x` `[1, D]` at a legal slot."""
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    p_page = p_cache + block * cache_strides[0]
    if FORMAT == "indexer_fp8":
        values, scale = quantize_fp8(x.to(tl.bfloat16).to(tl.float32))
        tl.store(p_page + offset * FP8_DATA + tl.arange(0, FP8_DATA)[None, :], values)
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
        one = tl.zeros((1,), tl.int64)
        store_kv(p_cache, cache_strides, slot + one, one == 0, x, p_kv_scale, FORMAT, BLOCK_SIZE)


@triton.jit
def _finish_entry(
    x, slot, weight, cos, sin, p_cache, p_kv_scale, eps, cache_strides, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HADAMARD: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the pooled float32 `x` `[1, D]`."""
    D: tl.constexpr = x.shape[1]
    x = rotate(normed(x, weight, eps, D), cos, sin, ROPE)
    if HADAMARD:
        DTYPE: tl.constexpr = p_cache.dtype.element_ty if FORMAT == "plain" else tl.bfloat16
        tile = tl.broadcast_to(x, (HADAMARD_TILE, D))
        first = tl.arange(0, HADAMARD_TILE)[:, None] == 0
        x = tl.sum(tl.where(first, rounded_hadamard(tile, DTYPE), 0.0), axis=0)[None, :]
    _store_entry(p_cache, slot, x, p_kv_scale, cache_strides, FORMAT, BLOCK_SIZE)


@triton.jit
def compress_tokens(
    program, part, p_cache, p_state, p_kv_score, p_ape, p_weight, p_cos_sin, p_kv_scale, p_pooled, p_arrived,
    p_state_slots, p_table, p_requests, p_positions, p_slots, eps, cache_strides, state_strides, kv_score_strides,
    ape_strides, weight_stride, cos_sin_strides, table_strides, token_strides, tokens, state_pages, num_slots,
    table_rows, table_columns, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    GROUPS: tl.constexpr, HADAMARD: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Store the entries that tokens [program * TOKENS, (program + 1) * TOKENS) close, one after the other.

    With PARTS > 1 each of as many programs pools some channels into `p_pooled` float32 `[T, D]`, and the last to arrive
    at a token, by its counter in `p_arrived` int32 `[T]`, zero before and after, finishes the entry.
    `token_strides` are of state slots, requests, positions and slots. ROWS is a power of two that holds a window.
    Without a kv_score, all states are in the cache.
    """
    COLUMNS: tl.constexpr = D // PARTS
    o_t = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = o_t < tokens
    state_slots = tl.load(p_state_slots + o_t * token_strides[0], mask=exists, other=-1)
    requests = tl.load(p_requests + o_t * token_strides[1], mask=exists, other=-1).to(tl.int64)
    positions = tl.load(p_positions + o_t * token_strides[2], mask=exists, other=-1).to(tl.int64)
    slots = tl.load(p_slots + o_t * token_strides[3], mask=exists, other=-1).to(tl.int64)
    closes = (positions >= 0) & ((positions + 1) % RATIO == 0) & (slots >= 0) & (slots < num_slots)
    closes &= (state_slots >= 0) & (state_slots // STATE_BLOCK < state_pages)
    token = tl.min(tl.where(closes, o_t, tokens), axis=0)
    while token < tokens:
        # An entry waits for memory three times: for what is above, for its blocks, and for everything else together.
        here = o_t == token
        request = tl.sum(tl.where(here, requests, 0), axis=0)
        position = tl.sum(tl.where(here, positions, 0), axis=0)
        slot = tl.sum(tl.where(here, slots, 0), axis=0)
        known = (request >= 0) & (request < table_rows)
        p_angle = p_cos_sin + table_row(position // RATIO * RATIO, max_pos) * cos_sin_strides[0]
        if PARTS == 1:
            cos, sin = load_cos_sin(p_angle, cos_sin_strides[1], True, D, ROPE)
            weight = load_weight(p_weight, weight_stride, D, D)
        # [1, COLUMNS]
        x = _pool(
            token, position, p_state, p_kv_score, p_ape, p_state_slots,
            p_table + tl.where(known, request, 0) * table_strides[0], state_strides, kv_score_strides, ape_strides,
            token_strides[0], table_strides[1], state_pages, tl.where(known, table_columns, 0), part * COLUMNS,
            COLUMNS, RATIO, GROUPS, STATE_BLOCK, ROWS, D,
        )  # fmt: skip
        if PARTS == 1:
            _finish_entry(
                x, slot, weight, cos, sin, p_cache, p_kv_scale, eps, cache_strides, FORMAT, BLOCK_SIZE, HADAMARD, ROPE
            )
        else:
            p_row = p_pooled + token * D
            tl.store(p_row + part * COLUMNS + tl.arange(0, COLUMNS)[None, :], x)
            if arrive(p_arrived + token) == PARTS - 1:
                whole = tl.load(p_row + tl.arange(0, D)[None, :], cache_modifier=".cg")
                cos, sin = load_cos_sin(p_angle, cos_sin_strides[1], True, D, ROPE)
                weight = load_weight(p_weight, weight_stride, D, D)
                _finish_entry(
                    whole, slot, weight, cos, sin, p_cache, p_kv_scale, eps, cache_strides, FORMAT, BLOCK_SIZE,
                    HADAMARD, ROPE,
                )  # fmt: skip
                tl.store(p_arrived + token, 0)
        token = tl.min(tl.where(closes & (o_t > token), o_t, tokens), axis=0)
