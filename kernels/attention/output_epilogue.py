"""Device functions around attention: queries on their way in, normed and rotated, and finished rows on their way out.

What comes out is bit for bit what `q_norm_rope` would have handed over, the order of its sum of squares aside, and what
`inv_rope` or `inv_rope_fp8_quant` would make of attention's rounded output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from ...layout import SCALE_ROW_ALIGN as _SCALE_ROW_ALIGN
from ...layout import SCALES_PER_WORD as _SCALES_PER_WORD
from ..device.quant import FP8_MAX, MANTISSA_BITS, e4m3, tile_byte, ue8m0_inverse
from ..device.rope import load_cos_sin, rotate, table_row
from .kv_load import e4m3_value

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)
SCALE_ROW_ALIGN = tl.constexpr(_SCALE_ROW_ALIGN)
SCALES_PER_WORD = tl.constexpr(_SCALES_PER_WORD)
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _turn_by_position(x, token, rope, INVERSE: tl.constexpr, ROPE: tl.constexpr):
    """float32 `x` `[N, D]`, heads of one token, rotated to the token's position or back."""
    p_positions, position_stride, p_table, table_strides, max_pos = rope
    row = table_row(tl.load(p_positions + token * position_stride), max_pos)
    cos, sin = load_cos_sin(p_table + row * table_strides[0], table_strides[1], True, x.shape[1], ROPE)
    return rotate(x, cos, -sin if INVERSE else sin, ROPE)


@triton.jit
def load_queries(
    p_q, stride_dim, m_head, token, rope, eps,
    DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """DTYPE `[N, BLOCK_D]` from pointers to the heads `[N]` of `token`; bytes are e4m3. Normed and rotated if `eps`."""
    o_dim = tl.arange(0, BLOCK_D)
    m_q = m_head[:, None] & (o_dim < D)[None, :]
    q = tl.load(p_q[:, None] + (o_dim * stride_dim)[None, :], mask=m_q, other=0)
    if p_q.dtype.element_ty == tl.uint8:
        q = e4m3_value(q)
    elif eps is not None:
        x = q.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + eps)[:, None]
        q = _turn_by_position(x, token, rope, False, ROPE).to(p_q.dtype.element_ty)
    return q.to(DTYPE)


@triton.jit
def store_rows(
    y, p_out, out_strides, p_scale, scale_tokens, token, first_head, rope,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, INVERSE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the finished rows `y` `[N, BLOCK_D]` of heads `first_head` to `first_head` + N - 1 of `token`.

    Args:
        y: in the dtype of attention's output.
        p_out, out_strides: `[T, H, D]` and its strides of a token and a head; e4m3 `[GROUPS, T, K]` where GROUPS > 0.
        p_scale, scale_tokens: where GROUPS > 0, scales `[GROUPS, n, Ta]` for a pair of T and Ta.
        rope: positions, their stride, table, its strides and its rows.
    """
    N: tl.constexpr = y.shape[0]
    if INVERSE:
        y = _turn_by_position(y.to(tl.float32), token, rope, True, ROPE)
    if GROUPS == 0:
        head = first_head + tl.arange(0, N)
        o_dim = tl.arange(0, y.shape[1])
        p_row = p_out + (token * out_strides[0] + head.to(tl.int64) * out_strides[1])[:, None] + o_dim[None, :]
        tl.store(p_row, y.to(p_out.dtype.element_ty), mask=(head < H)[:, None] & (o_dim < D)[None, :])
    else:
        _store_quantized(
            y.to(tl.float32), p_out, p_scale, scale_tokens, token, first_head, D, GROUPS, GROUP_HEADS, PACKED
        )


@triton.jit
def _store_quantized(
    x, p_values, p_scale, scale_tokens, token, first_head,
    D: tl.constexpr, GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store float32 rows `x` `[N, D]` as e4m3 in strips, and the scales of these."""
    N: tl.constexpr = x.shape[0]
    STRIPS: tl.constexpr = D // ACT_TILE  # of a head
    tokens, padded_tokens = scale_tokens
    o_tile = tl.arange(0, N * STRIPS)
    head = first_head + o_tile // STRIPS
    live = head < GROUPS * GROUP_HEADS
    # [N * STRIPS, ACT_TILE]
    x = tl.reshape(x, (N * STRIPS, ACT_TILE))
    byte = tile_byte(x, ACT_AMAX_FLOOR, FP8_MAX)
    group, strip = (head // GROUP_HEADS).to(tl.int64), head % GROUP_HEADS * STRIPS + o_tile % STRIPS
    p_strip = p_values + ((group * tokens + token) * (GROUP_HEADS * STRIPS) + strip)[:, None] * ACT_TILE
    tl.store(p_strip + tl.arange(0, ACT_TILE)[None, :], e4m3(x * ue8m0_inverse(byte)[:, None]), mask=live[:, None])
    if PACKED:
        WORDS: tl.constexpr = STRIPS // SCALES_PER_WORD
        quads = tl.reshape(byte, (N * WORDS, SCALES_PER_WORD))
        scale = tl.sum(quads << (8 * tl.arange(0, SCALES_PER_WORD))[None, :], axis=1)
        o_word = tl.arange(0, N * WORDS)
        head = first_head + o_word // WORDS
        live = head < GROUPS * GROUP_HEADS
        row = head * WORDS + o_word % WORDS
    else:
        scale = (byte << MANTISSA_BITS).to(tl.float32, bitcast=True)
        row = head * STRIPS + o_tile % STRIPS
    # Rows of all groups lie behind one another, as strips of all heads do.
    p_scale += row.to(tl.int64) * padded_tokens
    tl.store(p_scale + token, scale, mask=live)
    if token == tokens - 1:
        for pad in tl.static_range(1, SCALE_ROW_ALIGN):
            tl.store(p_scale + token + pad, tl.zeros_like(scale), mask=live & (token + pad < padded_tokens))
