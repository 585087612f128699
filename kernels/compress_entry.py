"""Device functions that pool, normalise, rotate and store the entries that tokens close.

Each lane of the window tile walks every ROWS-th position with a softmax of its own, and the lanes are merged behind the
loop: nothing is exchanged between threads while states are read. reference/compress_norm_rope_insert.py defines the
result.

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
from .kv_format import store_mla_rows
from .norm import normed
from .quant import e4m3, inverse_of
from .rope import load_cos_sin, rotate, table_row
from .save_partial_states import place_in_group

FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HADAMARD_TILE = tl.constexpr(HADAMARD_ROWS)


@triton.jit
def _pool(
    token, position, p_state, p_kv_score, p_ape, p_state_slots, p_table_row, p_positions, state_strides,
    kv_score_strides, ape_strides, state_slot_stride, table_stride, position_stride, state_pages, table_columns,
    first, COLUMNS: tl.constexpr,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """float32 `[COLUMNS]`: of the channels from `first` on, the softmax-weighted sum of the window that ends at
    `position`, that of `token`.

    With a kv_score, the state of the token k rows before is that token's row of kv_score, if the slot that it is
    saved at is the slot where the table has the position.
    """
    WINDOW: tl.constexpr = GROUPS * RATIO
    SCORES: tl.constexpr = GROUPS * D
    o_d = first + tl.arange(0, COLUMNS)[None, :]
    # [ROWS, COLUMNS]: largest score so far, sums of weights and of weighted values. A finite start keeps -inf - -inf
    # away.
    top = tl.full((ROWS, COLUMNS), LOWEST, tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    pooled = tl.zeros((ROWS, COLUMNS), tl.float32)
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
        block = tl.where(present, block, 0)
        offset = block * state_strides[0] + (logical % STATE_BLOCK) * state_strides[1]
        # The last group of positions has the last columns to itself, the one before it the first.
        channel = tl.where(back >= WINDOW - RATIO, (GROUPS - 1) * D, 0)[:, None] + o_d.to(tl.int64)
        p_value = p_state + offset[:, None] + channel * state_strides[2]
        cached = present
        if p_kv_score is not None:
            row = token - (WINDOW - 1) + back
            fresh = present & (row >= 0)
            row = tl.where(fresh, row, 0)
            saved_at = tl.load(p_state_slots + row * state_slot_stride, mask=fresh, other=-1)
            place = place_in_group(tl.load(p_positions + row * position_stride, mask=fresh, other=0), RATIO)
            fresh &= saved_at == block * STATE_BLOCK + logical % STATE_BLOCK
            cached = present & ~fresh
        value = tl.load(p_value, mask=cached[:, None], other=0.0)
        score = tl.load(p_value + SCORES * state_strides[2], mask=cached[:, None], other=float("-inf"))
        if p_kv_score is not None:
            p_value = p_kv_score + (row * kv_score_strides[0])[:, None] + channel * kv_score_strides[1]
            value = tl.load(p_value, mask=fresh[:, None], other=value)
            score = tl.load(p_value + SCORES * kv_score_strides[1], mask=fresh[:, None], other=score)
            p_bias = p_ape + (place * ape_strides[0])[:, None] + channel * ape_strides[1]
            bias = tl.load(p_bias, mask=fresh[:, None], other=0.0).to(tl.float32)
            score = tl.where(fresh[:, None], score + bias, score)

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


@triton.jit
def _finish_entry(
    x, slot, position, p_cache, p_weight, p_cos_sin, p_kv_scale, eps, cache_strides, weight_stride, cos_sin_strides,
    max_pos, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, HADAMARD: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the pooled float32 `x` `[1, D]` that the token at `position` closes."""
    D: tl.constexpr = x.shape[1]
    x = normed(x, p_weight, weight_stride, eps, D)
    row = table_row(position // RATIO * RATIO, max_pos)
    cos, sin = load_cos_sin(p_cos_sin + row * cos_sin_strides[0], cos_sin_strides[1], True, D, ROPE)
    x = rotate(x, cos, sin, ROPE)
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
    `token_strides` are of state slots, requests, positions and slots. Without a kv_score, all states are in the cache.
    """
    COLUMNS: tl.constexpr = D // PARTS
    o_t = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = o_t < tokens
    state_slots = tl.load(p_state_slots + o_t * token_strides[0], mask=exists, other=-1)
    positions = tl.load(p_positions + o_t * token_strides[2], mask=exists, other=-1).to(tl.int64)
    slots = tl.load(p_slots + o_t * token_strides[3], mask=exists, other=-1)
    closes = (positions >= 0) & ((positions + 1) % RATIO == 0) & (slots >= 0) & (slots < num_slots)
    closes &= (state_slots >= 0) & (state_slots // STATE_BLOCK < state_pages)
    token = tl.min(tl.where(closes, o_t, tokens), axis=0)
    while token < tokens:
        request = tl.load(p_requests + token * token_strides[1]).to(tl.int64)
        position = tl.load(p_positions + token * token_strides[2]).to(tl.int64)
        slot = tl.load(p_slots + token * token_strides[3])
        known = (request >= 0) & (request < table_rows)
        # [1, COLUMNS]
        x = _pool(
            token, position, p_state, p_kv_score, p_ape, p_state_slots,
            p_table + tl.where(known, request, 0) * table_strides[0], p_positions, state_strides, kv_score_strides,
            ape_strides, token_strides[0], table_strides[1], token_strides[2], state_pages,
            tl.where(known, table_columns, 0), part * COLUMNS, COLUMNS, RATIO, GROUPS, STATE_BLOCK, ROWS, D,
        )[None, :]  # fmt: skip
        if PARTS == 1:
            _finish_entry(
                x, slot, position, p_cache, p_weight, p_cos_sin, p_kv_scale, eps, cache_strides, weight_stride,
                cos_sin_strides, max_pos, FORMAT, BLOCK_SIZE, RATIO, HADAMARD, ROPE,
            )  # fmt: skip
        else:
            p_row = p_pooled + token * D
            tl.store(p_row + part * COLUMNS + tl.arange(0, COLUMNS)[None, :], x)
            if arrive(p_arrived + token) == PARTS - 1:
                whole = tl.load(p_row + tl.arange(0, D)[None, :], cache_modifier=".cg")
                _finish_entry(
                    whole, slot, position, p_cache, p_weight, p_cos_sin, p_kv_scale, eps, cache_strides,
                    weight_stride, cos_sin_strides, max_pos, FORMAT, BLOCK_SIZE, RATIO, HADAMARD, ROPE,
                )  # fmt: skip
                tl.store(p_arrived + token, 0)
        token = tl.min(tl.where(closes & (o_t > token), o_t, tokens), axis=0)
