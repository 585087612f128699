"""`save_partial_states`: one program writes a piece of a token's state row.

reference/save_partial_states.py defines it; every bit is equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv

PIECE = 1024
"""Columns of a program. A row of a main compressor is one or two, so that one token uses two multiprocessors."""


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
):
    """Program (p, c) writes columns [c * PIECE, (c + 1) * PIECE) of token p."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token * slot_stride)
    if (slot >= 0) & (slot < num_slots):
        phase = tl.load(p_positions + token * position_stride).to(tl.int64) % RATIO
        phase = tl.where(phase < 0, phase + RATIO, phase)
        # [PIECE]
        o_c = tl.program_id(1).to(tl.int64) * PIECE + tl.arange(0, PIECE)
        m_c = o_c < 2 * WIDTH
        x = tl.load(p_kv_score + token * kv_score_strides[0] + o_c * kv_score_strides[1], mask=m_c)
        m_score = m_c & (o_c >= WIDTH)
        bias = tl.load(p_ape + phase * ape_strides[0] + (o_c - WIDTH) * ape_strides[1], mask=m_score, other=0.0)
        # Selected: adding 0 to a value would turn -0 into 0.
        x = tl.where(m_score, x + bias.to(tl.float32), x)
        p_row = p_state + slot // STATE_BLOCK * state_strides[0] + slot % STATE_BLOCK * state_strides[1]
        tl.store(p_row + o_c * state_strides[2], x, mask=m_c)


def save_partial_states(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    """See the reference; the stored rows are equal."""
    tokens, width = state_slot_mapping.shape[0], ape.shape[1]
    if tokens == 0 or width == 0:
        return
    piece = min(PIECE, triton.next_power_of_2(2 * width))
    save_partial_states_kernel[(tokens, cdiv(2 * width, piece))](
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
    )
