"""Device functions that pool, normalize, rotate and store the entries that tokens close.

Several programs may split the channels of an entry. Its norm needs all channels, so the last program to arrive finishes
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .compress_window import Projection, States, fetch_blocks, fetch_last_block, fetch_own_state, pool

FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)
HADAMARD_TILE = tl.constexpr(HADAMARD_ROWS)
FINISHED = tl.constexpr(4)
"""Most entries that a program finishes at once, because each takes a row of registers."""


class Tokens(NamedTuple):
    """Lists of the step with an element for each token, their strides in this order, and the number of tokens."""

    p_state_slots: Any
    p_requests: Any
    p_positions: Any
    p_slots: Any
    strides: Any
    count: Any


class Entries(NamedTuple):
    """Cache of the entries, and the operands of their epilogue: scale, norm, and the RoPE table."""

    p_cache: Any
    strides: Any
    num_slots: Any
    p_kv_scale: Any
    p_weight: Any
    weight_stride: Any
    eps: Any
    p_cos_sin: Any
    cos_sin_strides: Any
    max_pos: Any


class Parts(NamedTuple):
    """Memory of programs that split entries, or None where each pools all channels.

    Attributes:
        p_pooled: float32 `[T, dim]`.
        p_arrived: int32 counter for each program's tokens, zero before and after.
    """

    p_pooled: Any
    p_arrived: Any


@triton.jit
def _store_entries(entries, slot, live, x, SHAPE: tl.constexpr):
    """Store the float32 entries `x` `[N, D]` at int64 `slot` `[N]`, in range everywhere, where `live` `[N]`."""
    FORMAT: tl.constexpr = SHAPE.fmt
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    p_cache, cache_strides = entries.p_cache, entries.strides
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
        store_kv(p_cache, cache_strides, slot, live, x, entries.p_kv_scale, FORMAT, BLOCK_SIZE)


@triton.jit
def _angles(position, live, entries, SHAPE: tl.constexpr):
    """Load cosine and sine for the entries that tokens at `position` `[N]` close, where `live` `[N]`."""
    row = table_row(position // SHAPE.ratio * SHAPE.ratio, entries.max_pos)
    p_row = entries.p_cos_sin + row[:, None] * entries.cos_sin_strides[0]
    return load_cos_sin(p_row, entries.cos_sin_strides[1], live[:, None], SHAPE.dim, SHAPE.rope)


@triton.jit
def _finish_entries(x, slot, live, weight, angles, entries, SHAPE: tl.constexpr):
    """Norm, rotate and store the pooled float32 `x` `[N, D]` where `live` `[N]`."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    x = rotate(rms_norm(x, weight, entries.eps, D), angles[0], angles[1], SHAPE.rope)
    if SHAPE.hadamard:
        DTYPE: tl.constexpr = entries.p_cache.dtype.element_ty if SHAPE.fmt == "plain" else tl.bfloat16
        COPIES: tl.constexpr = HADAMARD_TILE // N
        tile = tl.reshape(tl.broadcast_to(x[None, :, :], (COPIES, N, D)), (HADAMARD_TILE, D))
        tile = tl.reshape(rounded_hadamard(tile, DTYPE), (COPIES, N, D))
        x = tl.sum(tl.where(tl.arange(0, COPIES)[:, None, None] == 0, tile, 0.0), axis=0)
    slot = tl.where(live, slot, 0)
    _store_entries(entries, slot, live, x, SHAPE)


@triton.jit
def _closing(token, tokens, state_pages, num_slots, SHAPE: tl.constexpr):
    """Load what is known of `token`, all at once, whether it closes a group or not.

    Returns whether it closes a group, its state slot, position, slot, request, and the request of the token before it,
    int64.
    """
    strides = tokens.strides
    exists = token < tokens.count
    state_slot = tl.load(tokens.p_state_slots + token * strides[0], mask=exists, other=-1).to(tl.int64)
    position = tl.load(tokens.p_positions + token * strides[2], mask=exists, other=-1).to(tl.int64)
    slot = tl.load(tokens.p_slots + token * strides[3], mask=exists, other=-1).to(tl.int64)
    request = tl.load(tokens.p_requests + token * strides[1], mask=exists, other=-1).to(tl.int64)
    follows = exists & (token > 0)
    before = tl.load(tokens.p_requests + (token - 1) * strides[1], mask=follows, other=-1).to(tl.int64)
    scheduling_fence(tokens.p_positions)
    closes = (position >= 0) & ((position + 1) % SHAPE.ratio == 0) & (slot >= 0) & (slot < num_slots)
    closes &= (state_slot >= 0) & (state_slot // SHAPE.state_block < state_pages)
    return closes, state_slot, position, slot, request, before


@triton.jit
def _listed(closing):
    """Return the results of `_closing` for one token as tensors `[1]`, for several as they are."""
    if len(closing[0].shape) == 0:
        zero = tl.zeros((1,), tl.int64)
        closing = (
            closing[0] & (zero == 0), closing[1] + zero, closing[2] + zero, closing[3] + zero, closing[4] + zero,
            closing[5] + zero,
        )  # fmt: skip
    return closing


@triton.jit
def _pool_some(some, closing, part, states, projection, entries, p_pooled, SHAPE: tl.constexpr):
    """Pool part `part` of the channels of the entries that tokens `some` `[N]` close; `closing` is from `_closing`.

    Entries of a single part are finished and stored, other parts are written to `p_pooled`.
    """
    STATE_BLOCK: tl.constexpr = SHAPE.state_block
    COLUMNS: tl.constexpr = SHAPE.dim // SHAPE.parts
    # Groups end where blocks end, so that a window is whole blocks; with other sizes each row has its own block.
    WHOLE: tl.constexpr = SHAPE.ratio % STATE_BLOCK == 0 and STATE_BLOCK & (STATE_BLOCK - 1) == 0
    PLACES: tl.constexpr = STATE_BLOCK if WHOLE else 1
    live, state_slot, position, slot, request, before = _listed(closing)
    some += tl.zeros(live.shape, tl.int64)
    known = live & (request >= 0) & (request < states.table_rows)
    p_table_row = states.p_table + tl.where(known, request, 0) * states.table_strides[0]
    columns = tl.where(known, states.table_columns, 0)
    follow = False
    if projection is not None:
        follow = tl.max((known & (before == request)).to(tl.int32), axis=0) > 0
    blocks = fetch_blocks(position, p_table_row, states.table_strides[1], columns, PLACES, SHAPE)
    if projection is not None:
        last_block = fetch_last_block(position, live, p_table_row, states.table_strides[1], columns, STATE_BLOCK)
    if SHAPE.parts == 1:
        # In flight together with the blocks: no wait for either may precede the loads of the states.
        weight = load_weight(entries.p_weight, entries.weight_stride, SHAPE.dim, SHAPE.dim)
        angles = _angles(position, live, entries, SHAPE)
    scheduling_fence(states.p_table)
    o_channel = part * COLUMNS + tl.arange(0, COLUMNS)
    own = None
    if projection is not None:
        own = fetch_own_state(some, last_block, state_slot, projection, states.pages, o_channel, SHAPE)
    x = pool(some, follow, blocks, own, states, projection, o_channel, PLACES, SHAPE)
    if SHAPE.parts == 1:
        _finish_entries(x, slot, live, weight, angles, entries, SHAPE)
    else:
        tl.store(p_pooled + some[:, None] * SHAPE.dim + o_channel[None, :], x, mask=live[:, None])


@triton.jit
def _next(token, closes, o_t, tokens, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """Return the first of the tokens `o_t` `[TOKENS]` that `closes` after the STEP tokens around `token`.

    Returns `tokens` if there is none.
    """
    if TOKENS == STEP:
        token = tokens.to(tl.int64)
    else:
        token = tl.min(tl.where(closes & (o_t >= token // STEP * STEP + STEP), o_t, tokens), axis=0)
    return token


@triton.jit
def compress_tokens(program, part, tokens, states, projection, entries, parts, SHAPE: tl.constexpr):
    """Store the entries that the tokens of `program` close, so many `together`.

    With several parts, each of as many programs pools some channels into memory, and the last to arrive finishes the
    entries. Without a projection, all states are in the cache.
    """
    TOKENS: tl.constexpr = SHAPE.tokens
    TOGETHER: tl.constexpr = SHAPE.together
    PARTS: tl.constexpr = SHAPE.parts
    D: tl.constexpr = SHAPE.dim
    ALONE: tl.constexpr = TOGETHER == 1
    # Triton 3.6 loses the constants of tuples within a tuple at a loop or branch, unless the outer one is built here.
    tokens, states, entries = Tokens(*tokens), States(*states), Entries(*entries)
    if projection is not None:
        projection = Projection(*projection)
    state_pages, num_slots, count = states.pages, entries.num_slots, tokens.count
    start = program.to(tl.int64) * TOKENS
    o_t = start + tl.arange(0, TOKENS)
    if TOKENS == 1:
        # Scalars: tensors would be computed once for each layout.
        closing = _closing(start, tokens, state_pages, num_slots, SHAPE)
        first = tl.where(closing[0], start, count)
    else:
        closing = _closing(o_t, tokens, state_pages, num_slots, SHAPE)
        first = tl.min(tl.where(closing[0], o_t, count), axis=0)
    token = first
    while token < count:
        if TOKENS == TOGETHER:
            some, near = start if ALONE else o_t, closing
        else:
            # Loaded again, from the cache.
            some = token if ALONE else token // TOGETHER * TOGETHER + tl.arange(0, TOGETHER)
            near = _closing(some, tokens, state_pages, num_slots, SHAPE)
        _pool_some(some, near, part, states, projection, entries, parts.p_pooled, SHAPE)
        token = _next(token, closing[0], o_t, count, TOKENS, TOGETHER)
    # Once for all entries, because an arrival waits for memory twice.
    if PARTS > 1 and first < count:
        AT_ONCE: tl.constexpr = TOKENS if TOKENS < FINISHED else FINISHED
        if TOKENS == 1:
            # In flight while this waits for the other programs.
            live, _, position, slot, _, _ = _listed(closing)
            weight = load_weight(entries.p_weight, entries.weight_stride, D, D)
            angles = _angles(position, live, entries, SHAPE)
        if arrive(parts.p_arrived + program) == PARTS - 1:
            tl.store(parts.p_arrived + program, 0)
            if TOKENS > 1:
                weight = load_weight(entries.p_weight, entries.weight_stride, D, D)
            token = first
            while token < count:
                some = token // AT_ONCE * AT_ONCE + tl.arange(0, AT_ONCE)
                if TOKENS > 1:
                    live, _, position, slot, _, _ = _closing(some, tokens, state_pages, num_slots, SHAPE)
                    angles = _angles(position, live, entries, SHAPE)
                p_x = parts.p_pooled + some[:, None] * D + tl.arange(0, D)[None, :]
                x = tl.load(p_x, mask=live[:, None], other=0.0, cache_modifier=".cg")
                _finish_entries(x, slot, live, weight, angles, entries, SHAPE)
                token = _next(token, closing[0], o_t, count, TOKENS, AT_ONCE)
