"""`save_partial_states`: each program writes a piece of a token's state row, bit for bit as the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

PIECE = 1024
"""Columns of a program. A row of a main compressor is one or two pieces, so that one token uses two SMs."""


class Save(NamedTuple):
    """Pointers and strides of a save into a cache of `num_slots` state rows."""

    p_state: Any
    p_kv_score: Any
    p_ape: Any
    p_slots: Any
    p_positions: Any
    strides: Any
    num_slots: Any


class Strides(NamedTuple):
    """Strides of the tensors of a save."""

    state: Any
    kv_score: Any
    ape: Any
    slots: Any
    positions: Any


@triton.jit
def place_in_group(position, RATIO: tl.constexpr):
    """Return the int64 row of the score bias for integer `position`, which only padding tokens have negative."""
    place = position.to(tl.int64) % RATIO
    return tl.where(place < 0, place + RATIO, place)


@triton.jit
def save_rows(
    token, exists, piece, save,
    STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write columns [piece * PIECE, (piece + 1) * PIECE) of the state rows of `token` int64 `[N]`, where it exists."""
    strides = save.strides
    slot = tl.load(save.p_slots + token * strides.slots, mask=exists, other=-1)
    place = place_in_group(tl.load(save.p_positions + token * strides.positions, mask=exists, other=0), RATIO)
    live = (slot >= 0) & (slot < save.num_slots)
    o_c = piece * PIECE + tl.arange(0, PIECE)[None, :].to(tl.int64)
    # [N, PIECE]. Rows without a slot are read too: a row that waits for its slot waits for memory twice.
    mask = exists[:, None] & (o_c < 2 * WIDTH)
    x = tl.load(save.p_kv_score + token[:, None] * strides.kv_score[0] + o_c * strides.kv_score[1], mask=mask)
    m_score = mask & (o_c >= WIDTH)
    p_bias = save.p_ape + place[:, None] * strides.ape[0] + (o_c - WIDTH) * strides.ape[1]
    bias = tl.load(p_bias, mask=m_score, other=0.0).to(tl.float32)
    # Selected: adding 0 to a value would turn -0 into 0.
    x = tl.where(m_score, x + bias, x)
    slot = tl.where(live, slot, 0)
    p_row = save.p_state + slot // STATE_BLOCK * strides.state[0] + slot % STATE_BLOCK * strides.state[1]
    tl.store(p_row[:, None] + o_c * strides.state[2], x, mask=mask & live[:, None])


class Shape(NamedTuple):
    """Compile-time sizes of a launch: tokens of a page, rows and columns of the score bias, columns of a program."""

    state_block: int
    ratio: int
    width: int
    piece: int


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["p_slots", "p_positions"],
)
def save_partial_states_kernel(
    tensors,  # states [P, state_block, 2 * width] float32, scores [>= N, 2 * width] float32, score bias [ratio, width]
    p_slots,  # [N] int64
    p_positions,  # [>= N] int
    strides,
    num_slots,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write columns [c * piece, (c + 1) * piece) of token p in program (p, c)."""
    pdl_prologue(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    save = Save(tensors[0], tensors[1], tensors[2], p_slots, p_positions, strides, num_slots)
    save_rows(token, token >= 0, tl.program_id(1), save, SHAPE.state_block, SHAPE.ratio, SHAPE.width, SHAPE.piece)


def save_partial_states(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    """Store the same rows as the reference."""
    tokens, width = state_slot_mapping.shape[0], ape.shape[1]
    if tokens == 0 or width == 0:
        return
    piece = min(PIECE, triton.next_power_of_2(2 * width))
    places = state_slot_mapping.stride(0), positions.stride(0)
    launch_kernel(
        save_partial_states_kernel,
        (tokens, cdiv(2 * width, piece)),
        (state_cache, kv_score, ape),
        state_slot_mapping,
        positions,
        Strides(state_cache.stride(), kv_score.stride(), ape.stride(), *places),
        state_cache.shape[0] * block_size,
        SHAPE=Shape(block_size, ape.shape[0], width, piece),
        num_warps=min(4, max(1, piece // 256)),
        **pdl_arguments(kv_score.device, tokens * cdiv(2 * width, piece)),
    )
