"""Device functions that pool, normalise, rotate and store the entries that tokens close.

reference/compress_norm_rope_insert.py defines the result. Several programs may share an entry, each some of its
channels; its norm needs them all, and the last program to arrive takes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import INDEXER_FP8, INDEXER_MXFP4
from ..device.barriers import scheduling_fence
from ..device.hadamard import HADAMARD_ROWS, rounded_hadamard
from ..device.kv_format import store_kv
from ..device.norm import load_weight, rms_norm
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.semaphores import arrive
from ..indexer.indexer_format import quantize_fp8, quantize_mxfp4
from .compress_window import fetch_blocks, fetch_last_block, fetch_own_state, pool

FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)
HADAMARD_TILE = tl.constexpr(HADAMARD_ROWS)
FINISHED = tl.constexpr(4)
"""Most entries that a program finishes at once: a row of registers each."""


@triton.jit
def _store_entries(
    p_cache, slot, live, x, p_kv_scale, cache_strides, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Store the float32 entries `x` `[N, D]` at int64 `slot` `[N]`, legal everywhere, where `live` `[N]`."""
    if FORMAT == "indexer_fp8" or FORMAT == "indexer_mxfp4":
        offset, mask = slot % BLOCK_SIZE, live[:, None]
        p_page = p_cache + slot // BLOCK_SIZE * cache_strides[0]
        x = x.to(tl.bfloat16).to(tl.float32)
        if FORMAT == "indexer_fp8":
            values, scale = quantize_fp8(x)
            tl.store((p_page + offset * FP8_DATA)[:, None] + tl.arange(0, FP8_DATA)[None, :], values, mask=mask)
            o_byte = tl.arange(0, FP8_SCALE)[None, :]
            # Byte by byte: a page may begin anywhere.
            scale_bytes = (scale.to(tl.int32, bitcast=True)[:, None] >> (8 * o_byte)).to(tl.uint8)
            p_scale = p_page + (BLOCK_SIZE * FP8_DATA + offset * FP8_SCALE)
            tl.store(p_scale[:, None] + o_byte, scale_bytes, mask=mask)
        else:
            values, scale = quantize_mxfp4(x)
            tl.store((p_page + offset * MXFP4_DATA)[:, None] + tl.arange(0, MXFP4_DATA)[None, :], values, mask=mask)
            p_scale = p_page + (BLOCK_SIZE * MXFP4_DATA + offset * MXFP4_SCALE)
            tl.store(p_scale[:, None] + tl.arange(0, MXFP4_SCALE)[None, :], scale, mask=mask)
    else:
        store_kv(p_cache, cache_strides, slot, live, x, p_kv_scale, FORMAT, BLOCK_SIZE)


@triton.jit
def _angles(
    position, live, p_cos_sin, cos_sin_strides, max_pos, RATIO: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    """`load_cos_sin` of the entries whose groups tokens at `position` `[N]` close, where `live` `[N]`."""
    row = table_row(position // RATIO * RATIO, max_pos)
    return load_cos_sin(p_cos_sin + row[:, None] * cos_sin_strides[0], cos_sin_strides[1], live[:, None], D, ROPE)


@triton.jit
def _finish_entries(
    x, slot, live, weight, angles, p_cache, p_kv_scale, eps, cache_strides,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, HADAMARD: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the pooled float32 `x` `[N, D]` where `live` `[N]`."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    x = rotate(rms_norm(x, weight, eps, D), angles[0], angles[1], ROPE)
    if HADAMARD:
        DTYPE: tl.constexpr = p_cache.dtype.element_ty if FORMAT == "plain" else tl.bfloat16
        COPIES: tl.constexpr = HADAMARD_TILE // N
        tile = tl.reshape(tl.broadcast_to(x[None, :, :], (COPIES, N, D)), (HADAMARD_TILE, D))
        tile = tl.reshape(rounded_hadamard(tile, DTYPE), (COPIES, N, D))
        x = tl.sum(tl.where(tl.arange(0, COPIES)[:, None, None] == 0, tile, 0.0), axis=0)
    slot = tl.where(live, slot, 0)
    _store_entries(p_cache, slot, live, x, p_kv_scale, cache_strides, FORMAT, BLOCK_SIZE)


@triton.jit
def _closing(
    token, p_state_slots, p_requests, p_positions, p_slots, token_strides, tokens, state_pages, num_slots,
    STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Whether `token` closes a group, and its state slot, position, slot, request, and the request of the token before
    it, int64. All are loaded at once, whether it closes one or not."""
    exists = token < tokens
    state_slot = tl.load(p_state_slots + token * token_strides[0], mask=exists, other=-1).to(tl.int64)
    position = tl.load(p_positions + token * token_strides[2], mask=exists, other=-1).to(tl.int64)
    slot = tl.load(p_slots + token * token_strides[3], mask=exists, other=-1).to(tl.int64)
    request = tl.load(p_requests + token * token_strides[1], mask=exists, other=-1).to(tl.int64)
    before = tl.load(p_requests + (token - 1) * token_strides[1], mask=exists & (token > 0), other=-1).to(tl.int64)
    scheduling_fence(p_positions)
    closes = (position >= 0) & ((position + 1) % RATIO == 0) & (slot >= 0) & (slot < num_slots)
    closes &= (state_slot >= 0) & (state_slot // STATE_BLOCK < state_pages)
    return closes, state_slot, position, slot, request, before


@triton.jit
def _listed(closing):
    """What `_closing` gives of tokens `[N]`, of one token as tensors `[1]`."""
    if len(closing[0].shape) == 0:
        zero = tl.zeros((1,), tl.int64)
        closing = (
            closing[0] & (zero == 0), closing[1] + zero, closing[2] + zero, closing[3] + zero, closing[4] + zero,
            closing[5] + zero,
        )  # fmt: skip
    return closing


@triton.jit
def _pool_some(
    some, closing, part, p_cache, p_state, p_kv_score, p_ape, p_weight, p_cos_sin, p_kv_scale, p_pooled, p_state_slots,
    p_table, eps, cache_strides, state_strides, kv_score_strides, ape_strides, weight_stride,
    cos_sin_strides, table_strides, token_strides, state_pages, table_rows, table_columns, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    GROUPS: tl.constexpr, HADAMARD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    ROPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Pool part `part` of the channels of the entries that tokens `some` `[N]` close, as `_closing` tells; with all
    channels store the entries, with a part of them the part."""
    COLUMNS: tl.constexpr = D // PARTS
    # Groups end where blocks end, so that a window is whole blocks; of other sizes each row has a block to itself.
    WHOLE: tl.constexpr = RATIO % STATE_BLOCK == 0 and STATE_BLOCK & (STATE_BLOCK - 1) == 0
    PLACES: tl.constexpr = STATE_BLOCK if WHOLE else 1
    live, state_slot, position, slot, request, before = _listed(closing)
    some += tl.zeros(live.shape, tl.int64)
    known = live & (request >= 0) & (request < table_rows)
    p_table_row = p_table + tl.where(known, request, 0) * table_strides[0]
    columns = tl.where(known, table_columns, 0)
    follow = False
    if p_kv_score is not None:
        follow = tl.max((known & (before == request)).to(tl.int32), axis=0) > 0
    blocks = fetch_blocks(
        position, p_table_row, table_strides[1], columns, RATIO, GROUPS, STATE_BLOCK, PLACES, ROWS // PLACES
    )
    if p_kv_score is not None:
        last_block = fetch_last_block(position, live, p_table_row, table_strides[1], columns, STATE_BLOCK)
    if PARTS == 1:
        # In flight beside the blocks: what is made of these must not be waited for in front of the states.
        weight = load_weight(p_weight, weight_stride, D, D)
        angles = _angles(position, live, p_cos_sin, cos_sin_strides, max_pos, RATIO, D, ROPE)
    scheduling_fence(p_table)
    o_channel = part * COLUMNS + tl.arange(0, COLUMNS)
    own = None
    if p_kv_score is not None:
        own = fetch_own_state(
            some, last_block, state_slot, p_kv_score, p_ape, kv_score_strides, ape_strides, state_pages, o_channel,
            RATIO, GROUPS, STATE_BLOCK, D,
        )  # fmt: skip
    x = pool(
        some, follow, blocks, own, p_state, p_kv_score, p_ape, p_state_slots, state_strides, kv_score_strides,
        ape_strides, token_strides[0], state_pages, o_channel, RATIO, GROUPS, STATE_BLOCK, PLACES, ROWS // PLACES, D,
        DENSE,
    )  # fmt: skip
    if PARTS == 1:
        _finish_entries(
            x, slot, live, weight, angles, p_cache, p_kv_scale, eps, cache_strides, FORMAT, BLOCK_SIZE, HADAMARD, ROPE
        )
    else:
        tl.store(p_pooled + some[:, None] * D + o_channel[None, :], x, mask=live[:, None])


@triton.jit
def _next(token, closes, o_t, tokens, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """The first of the tokens `o_t` `[TOKENS]` that `closes`, behind the STEP tokens of which `token` is one; `tokens`
    if there is none."""
    if TOKENS == STEP:
        token = tokens.to(tl.int64)
    else:
        token = tl.min(tl.where(closes & (o_t >= token // STEP * STEP + STEP), o_t, tokens), axis=0)
    return token


@triton.jit
def compress_tokens(
    program, part, p_cache, p_state, p_kv_score, p_ape, p_weight, p_cos_sin, p_kv_scale, p_pooled, p_arrived,
    p_state_slots, p_table, p_requests, p_positions, p_slots, eps, cache_strides, state_strides, kv_score_strides,
    ape_strides, weight_stride, cos_sin_strides, table_strides, token_strides, tokens, state_pages, num_slots,
    table_rows, table_columns, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    GROUPS: tl.constexpr, HADAMARD: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Store the entries that tokens [program * TOKENS, (program + 1) * TOKENS) close, those of TOGETHER at once.

    With PARTS > 1 each of as many programs pools some channels into `p_pooled` float32 `[T, D]`, and the last to
    arrive, by the counter `program` of `p_arrived` int32, zero before and after, finishes the entries. `token_strides`
    are of state slots, requests, positions and slots. ROWS is a power of two that holds a window. Without a kv_score,
    all states are in the cache.
    """
    ALONE: tl.constexpr = TOGETHER == 1
    start = program.to(tl.int64) * TOKENS
    o_t = start + tl.arange(0, TOKENS)
    if TOKENS == 1:
        # Numbers, not tensors: those would be found once for each layout that they are wanted in.
        closing = _closing(
            start, p_state_slots, p_requests, p_positions, p_slots, token_strides, tokens, state_pages, num_slots,
            STATE_BLOCK, RATIO,
        )  # fmt: skip
        first = tl.where(closing[0], start, tokens)
    else:
        closing = _closing(
            o_t, p_state_slots, p_requests, p_positions, p_slots, token_strides, tokens, state_pages, num_slots,
            STATE_BLOCK, RATIO,
        )  # fmt: skip
        first = tl.min(tl.where(closing[0], o_t, tokens), axis=0)
    token = first
    while token < tokens:
        if TOKENS == TOGETHER:
            some, near = start if ALONE else o_t, closing
        else:
            # What is loaded again is near.
            some = token if ALONE else token // TOGETHER * TOGETHER + tl.arange(0, TOGETHER)
            near = _closing(
                some, p_state_slots, p_requests, p_positions, p_slots, token_strides, tokens, state_pages, num_slots,
                STATE_BLOCK, RATIO,
            )  # fmt: skip
        _pool_some(
            some, near, part, p_cache, p_state, p_kv_score, p_ape, p_weight, p_cos_sin, p_kv_scale, p_pooled,
            p_state_slots, p_table, eps, cache_strides, state_strides, kv_score_strides, ape_strides,
            weight_stride, cos_sin_strides, table_strides, token_strides, state_pages, table_rows, table_columns,
            max_pos, FORMAT, BLOCK_SIZE, STATE_BLOCK, RATIO, GROUPS, HADAMARD, PARTS, ROWS, D, ROPE, DENSE,
        )  # fmt: skip
        token = _next(token, closing[0], o_t, tokens, TOKENS, TOGETHER)
    # Once for all entries: an arrival waits for memory twice.
    if PARTS > 1 and first < tokens:
        AT_ONCE: tl.constexpr = TOKENS if TOKENS < FINISHED else FINISHED
        if TOKENS == 1:
            # What a single entry needs is in flight while this waits for the others.
            live, _, position, slot, _, _ = _listed(closing)
            weight = load_weight(p_weight, weight_stride, D, D)
            angles = _angles(position, live, p_cos_sin, cos_sin_strides, max_pos, RATIO, D, ROPE)
        if arrive(p_arrived + program) == PARTS - 1:
            tl.store(p_arrived + program, 0)
            if TOKENS > 1:
                weight = load_weight(p_weight, weight_stride, D, D)
            token = first
            while token < tokens:
                some = token // AT_ONCE * AT_ONCE + tl.arange(0, AT_ONCE)
                if TOKENS > 1:
                    live, _, position, slot, _, _ = _closing(
                        some, p_state_slots, p_requests, p_positions, p_slots, token_strides, tokens, state_pages,
                        num_slots, STATE_BLOCK, RATIO,
                    )  # fmt: skip
                    angles = _angles(position, live, p_cos_sin, cos_sin_strides, max_pos, RATIO, D, ROPE)
                p_x = p_pooled + some[:, None] * D + tl.arange(0, D)[None, :]
                x = tl.load(p_x, mask=live[:, None], other=0.0, cache_modifier=".cg")
                _finish_entries(
                    x, slot, live, weight, angles, p_cache, p_kv_scale, eps, cache_strides, FORMAT, BLOCK_SIZE,
                    HADAMARD, ROPE,
                )  # fmt: skip
                token = _next(token, closing[0], o_t, tokens, TOKENS, AT_ONCE)
