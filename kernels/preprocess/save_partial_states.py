"""`save_partial_states`: one program writes a piece of a token's state row.

reference/save_partial_states.py defines it; every bit is equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

PIECE = 1024
"""Columns of a program. A row of a main compressor is one or two, so that one token uses two multiprocessors."""


@triton.jit
def place_in_group(position, RATIO: tl.constexpr):
    """int64 row of the score bias for integer `position`, which only padding tokens have negative."""
    place = position.to(tl.int64) % RATIO
    return tl.where(place < 0, place + RATIO, place)


@triton.jit
def save_rows(
    token, exists, piece, p_state, p_kv_score, p_ape, p_slots, p_positions, state_strides, kv_score_strides,
    ape_strides, slot_stride, position_stride, num_slots,
    STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write columns [piece * PIECE, (piece + 1) * PIECE) of the state rows of `token` int64 `[N]`, where it exists."""
    slot = tl.load(p_slots + token * slot_stride, mask=exists, other=-1)
    place = place_in_group(tl.load(p_positions + token * position_stride, mask=exists, other=0), RATIO)
    live = (slot >= 0) & (slot < num_slots)
    o_c = piece * PIECE + tl.arange(0, PIECE)[None, :].to(tl.int64)
    # [N, PIECE]. Rows without a slot are read too: a row that waits for its slot waits for memory twice.
    mask = exists[:, None] & (o_c < 2 * WIDTH)
    x = tl.load(p_kv_score + token[:, None] * kv_score_strides[0] + o_c * kv_score_strides[1], mask=mask)
    m_score = mask & (o_c >= WIDTH)
    p_bias = p_ape + place[:, None] * ape_strides[0] + (o_c - WIDTH) * ape_strides[1]
    bias = tl.load(p_bias, mask=m_score, other=0.0).to(tl.float32)
    # Selected: adding 0 to a value would turn -0 into 0.
    x = tl.where(m_score, x + bias, x)
    slot = tl.where(live, slot, 0)
    p_row = p_state + slot // STATE_BLOCK * state_strides[0] + slot % STATE_BLOCK * state_strides[1]
    tl.store(p_row[:, None] + o_c * state_strides[2], x, mask=mask & live[:, None])


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["p_slots", "p_positions"],
)
def save_partial_states_kernel(
    p_state,  # [P, STATE_BLOCK, 2 * WIDTH] float32
    p_kv_score,  # [>= N, 2 * WIDTH] float32
    p_ape,  # [RATIO, WIDTH]
    p_slots,  # [N] int64
    p_positions,  # [>= N] int
    state_strides,
    kv_score_strides,
    ape_strides,
    slot_stride,
    position_stride,
    num_slots,
    STATE_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, c) writes columns [c * PIECE, (c + 1) * PIECE) of token p."""
    pdl_prologue(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    save_rows(
        token, token >= 0, tl.program_id(1), p_state, p_kv_score, p_ape, p_slots, p_positions, state_strides,
        kv_score_strides, ape_strides, slot_stride, position_stride, num_slots, STATE_BLOCK, RATIO, WIDTH, PIECE,
    )  # fmt: skip


def save_partial_states(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    """See the reference; the stored rows are equal."""
    tokens, width = state_slot_mapping.shape[0], ape.shape[1]
    if tokens == 0 or width == 0:
        return
    piece = min(PIECE, triton.next_power_of_2(2 * width))
    launch_kernel(
        save_partial_states_kernel,
        (tokens, cdiv(2 * width, piece)),
        state_cache,
        kv_score,
        ape,
        state_slot_mapping,
        positions,
        state_cache.stride(),
        kv_score.stride(),
        ape.stride(),
        state_slot_mapping.stride(0),
        positions.stride(0),
        state_cache.shape[0] * block_size,
        STATE_BLOCK=block_size,
        RATIO=ape.shape[0],
        WIDTH=width,
        PIECE=piece,
        num_warps=min(4, max(1, piece // 256)),
        **pdl_arguments(kv_score.device, tokens * cdiv(2 * width, piece)),
    )
