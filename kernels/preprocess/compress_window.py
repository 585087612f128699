"""Device functions that pool the window of states that an entry is made of, for some of its channels.

States may be pooled in the launch that saves them. Then no program waits for another: those that this step writes are
taken from its projection, the others from the cache. Channels are pooled each by itself.

A tile of a window stays in registers, and its loads are all in flight together: reading states is all that pooling
takes. A thread has all places of a block, so that it looks up few blocks, whose rows lie at fixed distances.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..device.barriers import scheduling_fence

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))
STATE_ALIGN = 16
"""Bytes that rows of states start at multiples of where four columns are one load."""
ALIGN = tl.constexpr(STATE_ALIGN)


@triton.jit
def fetch_blocks(
    position, p_table_row, table_stride, table_columns,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where the windows that end at `position` `[N]` are, `[N, BLOCKS]` for each PLACES rows of them: whether the table
    may have them, the page that it has, and the first of their places there.

    `p_table_row` and `table_columns` `[N]`: the row of each in the block table, and how much of it may be read.
    """
    WINDOW: tl.constexpr = GROUPS * RATIO
    o_row = tl.arange(0, BLOCKS)[None, :] * PLACES
    logical = position.to(tl.int32)[:, None] - (WINDOW - 1) + o_row
    present = (logical >= 0) & (o_row < WINDOW)
    logical = tl.where(present, logical, 0).to(tl.uint32)
    column, place = (logical // STATE_BLOCK).to(tl.int32), (logical % STATE_BLOCK).to(tl.int32)
    present &= column < table_columns[:, None]
    p_page = p_table_row[:, None] + tl.where(present, column, 0) * table_stride
    return present, tl.load(p_page, mask=present, other=-1), place


@triton.jit
def fetch_last_block(position, live, p_table_row, table_stride, table_columns, STATE_BLOCK: tl.constexpr):
    """As `fetch_blocks`, `[N]`, of the last row of the windows that end at `position` where `live`."""
    column, place = position.to(tl.int32) // STATE_BLOCK, position % STATE_BLOCK
    present = live & (column < table_columns)
    return present, tl.load(p_table_row + tl.where(present, column, 0) * table_stride, mask=present, other=-1), place


@triton.jit
def _legal(block, state_pages):
    """What the above give, where the cache has the page, which is int64 and 0 where it has not."""
    present, page, place = block
    present &= (page >= 0) & (page < state_pages)
    return present, tl.where(present, page, 0).to(tl.int64), place


@triton.jit
def fetch_own_state(
    token, block, state_slot, p_kv_score, p_ape, kv_score_strides, ape_strides, state_pages, o_channel,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Of `token` `[N]` itself, the last of its window, whose `block` is that of `fetch_last_block`: bool `[N]` whether
    it is saved there in this step, and the value, score and bias `[N, COLUMNS]` that are; else the cache has it."""
    present, page, place = _legal(block, state_pages)
    fresh = present & (state_slot == page * STATE_BLOCK + place)
    channel, mask = ((GROUPS - 1) * D + o_channel)[None, :], fresh[:, None]
    p_value = (p_kv_score + token * kv_score_strides[0])[:, None] + channel * kv_score_strides[1]
    value = tl.load(p_value, mask=mask, other=0.0)
    score = tl.load(p_value + GROUPS * D * kv_score_strides[1], mask=mask, other=0.0)
    bias = tl.load(p_ape + (RATIO - 1) * ape_strides[0] + channel * ape_strides[1], mask=mask, other=0.0)
    return fresh, value, score, bias


@triton.jit
def _places(p_base, offsets, ALIGNED: tl.constexpr):
    """Addresses `p_base + offsets` `[N, BLOCKS, PLACES, COLUMNS]`, whose loads the warps share by windows, then blocks.

    What is said to lie together along a dim orders the dims; loads make use of it along the last alone. Left to itself,
    Triton gives places to warps from 3.7 on, so that sums go through shared memory, and does not see from 3.8 on that
    rows are aligned: an indexer's entry takes 2448 and 1248 instructions instead of 832.
    """
    # What is said is said of the sum: of an argument it would be lost.
    places = p_base + offsets
    places = tl.max_contiguous(places, (4, 2, 1, places.shape[3]))
    return tl.multiple_of(places, (1, 1, 1, ALIGN)) if ALIGNED else places


@triton.jit
def _cached_states(
    p_state, page, place, group, o_channel, mask, strides,
    PLACES: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Values and scores `[N, BLOCKS, PLACES, COLUMNS]` of the cache where `mask` `[N, BLOCKS, PLACES]`; 0 and -inf.

    With DENSE, rows follow each other, so that their distances are part of the instructions, and are aligned.
    """
    p_block = p_state + page * strides[0] + place * strides[1] + group[None, :] * strides[2]
    p_block = p_block[:, :, None, None] + (o_channel * strides[2])[None, None, None, :]
    o_place = tl.arange(0, PLACES)[None, None, :, None]
    offsets = o_place * (2 * GROUPS * D) if DENSE else o_place * strides[1]
    mask = mask[:, :, :, None]
    # No state is read again before it is overwritten, and a step of long windows reads more than a cache holds.
    EVICT: tl.constexpr = "evict_first" if GROUPS == 1 else ""
    value = tl.load(_places(p_block, offsets, DENSE), mask=mask, other=0.0, eviction_policy=EVICT)
    # All loads are in flight together: without a barrier the compiler loads half of the values behind the scores' top.
    tl.debug_barrier()
    p_score = _places(p_block, offsets + GROUPS * D * strides[2], DENSE)
    score = tl.load(p_score, mask=mask, other=float("-inf"), eviction_policy=EVICT)
    return value, score


@triton.jit
def _mixed_states(
    token, p_state, p_kv_score, p_ape, p_state_slots, page, place, group, o_channel, back, present, state_strides,
    kv_score_strides, ape_strides, slot_stride,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, PLACES: tl.constexpr, D: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """`_cached_states` with those from the projection that this step saves: of the token k rows before, if the slot
    that it is saved at is the slot where the table has its position. `back` `[BLOCKS, PLACES]` is -k."""
    row = token[:, None, None] + back[None, :, :]
    fresh = present & (row >= 0)
    saved_at = tl.load(p_state_slots + row * slot_stride, mask=fresh, other=-1)
    if GROUPS > 1:
        # Not of long windows, which take all registers: what follows would wait for more.
        scheduling_fence(p_state_slots)
    fresh &= saved_at == (page * STATE_BLOCK + place)[:, :, None] + tl.arange(0, PLACES)[None, None, :]
    cached, mask = present & ~fresh, fresh[:, :, :, None]
    value, score = _cached_states(
        p_state, page, place, group, o_channel, cached, state_strides, PLACES, GROUPS, D, DENSE
    )
    channel = group[None, :, None, None] + o_channel[None, None, None, :]
    p_value = (p_kv_score + row * kv_score_strides[0])[:, :, :, None] + channel * kv_score_strides[1]
    value = tl.load(p_value, mask=mask, other=value)
    score = tl.load(p_value + GROUPS * D * kv_score_strides[1], mask=mask, other=score)
    # Groups begin with the window.
    p_bias = (
        p_ape + ((back + (GROUPS * RATIO - 1)) % RATIO * ape_strides[0])[None, :, :, None] + channel * ape_strides[1]
    )
    return value, score + tl.load(p_bias, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(a, b, c, d):
    """The sums of two pairs, for one reduction of both."""
    return a + c, b + d


@triton.jit
def pool(
    token, follow, blocks, own, p_state, p_kv_score, p_ape, p_state_slots, state_strides, kv_score_strides,
    ape_strides, slot_stride, state_pages, o_channel,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, STATE_BLOCK: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """float32 `[N, COLUMNS]`: the softmax-weighted sums of the channels `o_channel` of the windows that end with
    `token` `[N]`; 0 of windows of which the cache has nothing.

    `blocks` are of `fetch_blocks`; with a projection, `own` is of `fetch_own_state`. Only if one of the tokens follows
    one of its request, `follow`, may the projection have other states of theirs: a decode step, where none does, reads
    these from the cache and nowhere else.
    """
    WINDOW: tl.constexpr = GROUPS * RATIO
    present, page, place = _legal(blocks, state_pages)
    o_row = tl.arange(0, BLOCKS) * PLACES
    back = o_row[:, None] + tl.arange(0, PLACES)[None, :] - (WINDOW - 1)
    # The last group of positions has the last columns to itself, the one before it the first.
    group = tl.where(o_row >= WINDOW - RATIO, (GROUPS - 1) * D, 0)
    mask = tl.broadcast_to(present[:, :, None], (present.shape[0], BLOCKS, PLACES))
    if p_kv_score is None:
        value, score = _cached_states(
            p_state, page, place, group, o_channel, mask, state_strides, PLACES, GROUPS, D, DENSE
        )
    elif follow:
        value, score = _mixed_states(
            token, p_state, p_kv_score, p_ape, p_state_slots, page, place, group, o_channel, back, mask, state_strides,
            kv_score_strides, ape_strides, slot_stride, RATIO, GROUPS, STATE_BLOCK, PLACES, D, DENSE,
        )  # fmt: skip
    else:
        fresh, own_value, own_score, bias = own
        mask &= (back < 0)[None, :, :] | ~fresh[:, None, None]
        value, score = _cached_states(
            p_state, page, place, group, o_channel, mask, state_strides, PLACES, GROUPS, D, DENSE
        )
        # Behind the loads of the cache, which are on their way when this is waited for.
        is_own = (back == 0)[None, :, :, None] & fresh[:, None, None, None]
        value = tl.where(is_own, own_value[:, None, None, :], value)
        score = tl.where(is_own, (own_score + bias.to(tl.float32))[:, None, None, :], score)
    # A finite top keeps -inf - -inf away.
    top = tl.maximum(tl.max(tl.max(score, axis=2), axis=1), LOWEST)
    weight = tl.exp2((score - top[:, None, None, :]) * LOG2_E)
    pooled, total = tl.reduce((tl.sum(weight * value, axis=2), tl.sum(weight, axis=2)), 1, _add)
    return tl.where(total == 0, 0.0, pooled / total)
