"""Device functions that pool the window of states of an entry, for some of its channels.

States may be pooled in the launch that saves them, and no program waits: states of this step are taken from its
projection, older ones from the cache. Each channel is pooled by itself.

A tile of a window stays in registers and all its loads are in flight together, because reading states is nearly all of
the work. A thread has all places of a block, so that it looks up few blocks, whose rows lie at fixed distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device.barriers import scheduling_fence

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))
STATE_ALIGN = 16
"""Alignment in bytes of state rows that allows one load for four columns."""
ALIGN = tl.constexpr(STATE_ALIGN)


class PoolShape(NamedTuple):
    """Compile-time sizes of a compressor's pools.

    Attributes:
        fmt, block_size: of the cache of entries, in entries.
        state_block: tokens of a page of states.
        ratio, groups: tokens of a group, and groups of a window.
        hadamard: transform entries.
        tokens, together: tokens of a program, and how many of them are pooled at once.
        parts: programs that split the channels of an entry.
        rows: power of two that holds the positions of a window.
        dim, rope: dims of an entry, and how many of them are rotated.
        dense: state rows are adjacent and aligned.
    """

    fmt: str = "plain"
    block_size: int = 1
    state_block: int = 1
    ratio: int = 1
    groups: int = 1
    hadamard: bool = False
    tokens: int = 1
    together: int = 1
    parts: int = 1
    rows: int = 1
    dim: int = 1
    rope: int = 0
    dense: bool = False


class States(NamedTuple):
    """Saved states: pages of the cache, and the block table of each request."""

    p_state: Any
    strides: Any
    pages: Any
    p_table: Any
    table_strides: Any
    table_rows: Any
    table_columns: Any


class Projection(NamedTuple):
    """States of this step before they are saved: values and scores of each token, and the score bias."""

    p_kv_score: Any
    strides: Any
    p_ape: Any
    ape_strides: Any
    p_slots: Any
    slot_stride: Any


@triton.jit
def fetch_blocks(position, p_table_row, table_stride, table_columns, PLACES: tl.constexpr, SHAPE: tl.constexpr):
    """Look up the blocks of the windows that end at `position` `[N]`, one for each PLACES rows: `[N, BLOCKS]` each.

    Returns whether the table may have the block, its page, and the place of the first row in the page. `p_table_row`
    and `table_columns` `[N]` are the row of each window in the block table, and how much of it may be read.
    """
    STATE_BLOCK: tl.constexpr = SHAPE.state_block
    BLOCKS: tl.constexpr = SHAPE.rows // PLACES
    WINDOW: tl.constexpr = SHAPE.groups * SHAPE.ratio
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
    """Look up, as `fetch_blocks` does, the block of `position` `[N]`, the last of its window, where `live`."""
    column, place = position.to(tl.int32) // STATE_BLOCK, position % STATE_BLOCK
    present = live & (column < table_columns)
    return present, tl.load(p_table_row + tl.where(present, column, 0) * table_stride, mask=present, other=-1), place


@triton.jit
def _legal(block, state_pages):
    """Restrict a looked-up block to pages of the cache; return the page as int64, 0 if the cache does not have it."""
    present, page, place = block
    present &= (page >= 0) & (page < state_pages)
    return present, tl.where(present, page, 0).to(tl.int64), place


@triton.jit
def fetch_own_state(token, block, state_slot, projection, state_pages, o_channel, SHAPE: tl.constexpr):
    """Load the states of `token` `[N]`, the last of their windows; `block` comes from `fetch_last_block`.

    Returns bool `[N]`, whether this step saves the state in that block (if not, the cache has it), and the value, score
    and bias `[N, COLUMNS]` where it does.
    """
    D: tl.constexpr = SHAPE.dim
    p_kv_score, strides, p_ape, ape_strides, _, _ = projection
    present, page, place = _legal(block, state_pages)
    fresh = present & (state_slot == page * SHAPE.state_block + place)
    channel, mask = ((SHAPE.groups - 1) * D + o_channel)[None, :], fresh[:, None]
    p_value = (p_kv_score + token * strides[0])[:, None] + channel * strides[1]
    value = tl.load(p_value, mask=mask, other=0.0)
    score = tl.load(p_value + SHAPE.groups * D * strides[1], mask=mask, other=0.0)
    bias = tl.load(p_ape + (SHAPE.ratio - 1) * ape_strides[0] + channel * ape_strides[1], mask=mask, other=0.0)
    return fresh, value, score, bias


@triton.jit
def _places(p_base, offsets, ALIGNED: tl.constexpr):
    """Return addresses `p_base + offsets` `[N, BLOCKS, PLACES, COLUMNS]` whose loads warps split by windows and blocks.

    The contiguity hints along a dim order the dims; loads use the one along the last dim alone. Without them Triton
    splits places over warps from 3.7 on, so that sums go through shared memory, and from 3.8 on it does not see that
    rows are aligned.
    """
    # Hints on an argument would be lost; they must be on the sum.
    places = p_base + offsets
    places = tl.max_contiguous(places, (4, 2, 1, places.shape[3]))
    return tl.multiple_of(places, (1, 1, 1, ALIGN)) if ALIGNED else places


@triton.jit
def _cached_states(states, page, place, group, o_channel, mask, SHAPE: tl.constexpr):
    """Load values and scores `[N, BLOCKS, PLACES, COLUMNS]` from the cache where `mask` `[N, BLOCKS, PLACES]`.

    Elsewhere they are 0 and -inf. Dense rows have fixed distances, which are part of the instructions, and are aligned.
    """
    GROUPS: tl.constexpr = SHAPE.groups
    D: tl.constexpr = SHAPE.dim
    DENSE: tl.constexpr = SHAPE.dense
    strides = states.strides
    p_block = states.p_state + page * strides[0] + place * strides[1] + group[None, :] * strides[2]
    p_block = p_block[:, :, None, None] + (o_channel * strides[2])[None, None, None, :]
    o_place = tl.arange(0, mask.shape[2])[None, None, :, None]
    offsets = o_place * (2 * GROUPS * D) if DENSE else o_place * strides[1]
    mask = mask[:, :, :, None]
    # No state is read again before it is overwritten, and a step of long windows reads more than the L2 cache holds.
    EVICT: tl.constexpr = "evict_first" if GROUPS == 1 else ""
    value = tl.load(_places(p_block, offsets, DENSE), mask=mask, other=0.0, eviction_policy=EVICT)
    # All loads are in flight together: without a barrier the compiler loads half of the values after the scores' max.
    tl.debug_barrier()
    p_score = _places(p_block, offsets + GROUPS * D * strides[2], DENSE)
    score = tl.load(p_score, mask=mask, other=float("-inf"), eviction_policy=EVICT)
    return value, score


@triton.jit
def _mixed_states(token, states, projection, block, group, o_channel, back, SHAPE: tl.constexpr):
    """Load states as `_cached_states` does, but from the projection where this step saves them.

    That is the state of the token k rows before, if it is saved in the slot that the table has for its
    position. `back` `[BLOCKS, PLACES]` is -k; `block` is the mask `[N, BLOCKS, PLACES]`, page and place.
    """
    RATIO: tl.constexpr = SHAPE.ratio
    GROUPS: tl.constexpr = SHAPE.groups
    D: tl.constexpr = SHAPE.dim
    present, page, place = block
    p_kv_score, strides, p_ape, ape_strides, p_slots, slot_stride = projection
    row = token[:, None, None] + back[None, :, :]
    fresh = present & (row >= 0)
    saved_at = tl.load(p_slots + row * slot_stride, mask=fresh, other=-1)
    if GROUPS > 1:
        # Not for long windows, which take all registers: the code below would wait for more loads.
        scheduling_fence(p_slots)
    fresh &= saved_at == (page * SHAPE.state_block + place)[:, :, None] + tl.arange(0, back.shape[1])[None, None, :]
    cached, mask = present & ~fresh, fresh[:, :, :, None]
    value, score = _cached_states(states, page, place, group, o_channel, cached, SHAPE)
    channel = group[None, :, None, None] + o_channel[None, None, None, :]
    p_value = (p_kv_score + row * strides[0])[:, :, :, None] + channel * strides[1]
    value = tl.load(p_value, mask=mask, other=value)
    score = tl.load(p_value + GROUPS * D * strides[1], mask=mask, other=score)
    # Groups begin with the window.
    p_bias = (
        p_ape + ((back + (GROUPS * RATIO - 1)) % RATIO * ape_strides[0])[None, :, :, None] + channel * ape_strides[1]
    )
    return value, score + tl.load(p_bias, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(a, b, c, d):
    """Add two pairs, for one reduction of both."""
    return a + c, b + d


@triton.jit
def pool(token, follow, blocks, own, states, projection, o_channel, PLACES: tl.constexpr, SHAPE: tl.constexpr):
    """Pool the channels `o_channel` of the windows that end with `token` `[N]`: float32 `[N, COLUMNS]`.

    A channel is the softmax-weighted sum of the window, 0 if the cache has nothing of it. `blocks` come from
    `fetch_blocks`; with a projection, `own` comes from `fetch_own_state`. Only if one of the tokens follows a token of
    its request (`follow`) may the projection have other states of their windows: a decode step, where none does, reads
    them from the cache alone.
    """
    BLOCKS: tl.constexpr = SHAPE.rows // PLACES
    WINDOW: tl.constexpr = SHAPE.groups * SHAPE.ratio
    present, page, place = _legal(blocks, states.pages)
    o_row = tl.arange(0, BLOCKS) * PLACES
    back = o_row[:, None] + tl.arange(0, PLACES)[None, :] - (WINDOW - 1)
    # The last group of positions has the last columns to itself, the one before it the first.
    group = tl.where(o_row >= WINDOW - SHAPE.ratio, (SHAPE.groups - 1) * SHAPE.dim, 0)
    mask = tl.broadcast_to(present[:, :, None], (present.shape[0], BLOCKS, PLACES))
    if projection is None:
        value, score = _cached_states(states, page, place, group, o_channel, mask, SHAPE)
    elif follow:
        value, score = _mixed_states(token, states, projection, (mask, page, place), group, o_channel, back, SHAPE)
    else:
        fresh, own_value, own_score, bias = own
        mask &= (back < 0)[None, :, :] | ~fresh[:, None, None]
        value, score = _cached_states(states, page, place, group, o_channel, mask, SHAPE)
        # After the loads from the cache, which are in flight while this waits.
        is_own = (back == 0)[None, :, :, None] & fresh[:, None, None, None]
        value = tl.where(is_own, own_value[:, None, None, :], value)
        score = tl.where(is_own, (own_score + bias.to(tl.float32))[:, None, None, :], score)
    # A finite maximum avoids -inf - -inf.
    top = tl.maximum(tl.max(tl.max(score, axis=2), axis=1), LOWEST)
    weight = tl.exp2((score - top[:, None, None, :]) * LOG2_E)
    pooled, total = tl.reduce((tl.sum(weight * value, axis=2), tl.sum(weight, axis=2)), 1, _add)
    return tl.where(total == 0, 0.0, pooled / total)
