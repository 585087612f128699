"""`inv_rope` and `inv_rope_fp8_quant`; reference/inv_rope_fp8_quant.py defines them, scale layouts included.

A program takes a few heads of one token, or with quantisation of a few tokens: then neighbouring tokens' scales, which
lie side by side, are written together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from ...layout import SCALES_PER_WORD as _SCALES_PER_WORD
from ...layout import cdiv
from ...reference.attention.inv_rope import scale_strides, value_strides
from ..device.quant import FP8_MAX, MANTISSA_BITS, amax_byte, scaled_e4m3, ue8m0_inverse, why_unsupported_fp8
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.gpu import register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)
SCALES_PER_WORD = tl.constexpr(_SCALES_PER_WORD)
SPREAD_ROWS, FEW_ROWS = 768, 4096
"""Up to so many heads in all, a program takes one, or two; above four with quantisation. Measured on an H200."""
STRIPS_REGISTERS = 72
"""Of a thread where heads are taken in strips: as many as there are for 28 warps of a processor. With 64, some loads
wait for others where scales are packed."""


@triton.jit
def _larger(a, b):
    """The larger of two magnitudes, NaN if one is. As floats: the sign costs an integer comparison an instruction."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _unrotated(
    p_o, p_positions, p_table, token, head, live, o_strides, position_stride, table_strides, max_pos,
    D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """float32 `[N, D]`: `head` `[N]` of `token` `[N]`, its last ROPE dims rotated back; 0 where not `live` `[N]`, which
    may be None."""
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    p_x = p_o + (token * o_strides[0] + head.to(tl.int64) * o_strides[1])[:, None] + o_d * o_strides[2]
    if live is None:
        position, x = tl.load(p_positions + token * position_stride), tl.load(p_x)
        m_row = True
    else:
        position = tl.load(p_positions + token * position_stride, mask=live, other=0)
        x = tl.load(p_x, mask=live[:, None], other=0.0)
        m_row = live[:, None]
    p_row = p_table + table_row(position, max_pos)[:, None] * table_strides[0]
    cos, sin = load_cos_sin(p_row, table_strides[1], m_row, D, ROPE)
    return rotate(x.to(tl.float32), cos, -sin, ROPE)


@triton.jit(do_not_specialize=["max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_kernel(
    p_out,  # [T, HEADS, D] contiguous
    p_o,  # [T, HEADS, D]
    p_positions,  # [>= T] int
    p_table,  # [max_pos, ROPE] float32
    o_strides,
    position_stride,
    table_strides,
    max_pos,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes BLOCK_H heads of token p // blocks."""
    pdl_prologue(PDL)
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) + tl.zeros((BLOCK_H,), tl.int64)
    head = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < HEADS
    x = _unrotated(
        p_o, p_positions, p_table, token, head, live, o_strides, position_stride, table_strides, max_pos, D, ROPE
    )
    p_row = p_out + (token * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(p_row, x.to(p_out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _place(GROUPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Which block of heads a program takes, of which group, and its first token; the last two are int64."""
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    group = (program // BLOCKS % GROUPS).to(tl.int64)
    return program % BLOCKS, group, (program // (BLOCKS * GROUPS)).to(tl.int64) * BLOCK_T


@triton.jit
def _quantised(x):
    """e4m3 of float32 strips `x` `[N, ACT_TILE]`, and their UE8M0 bytes, int32 `[N]`."""
    amax = tl.reduce(tl.abs(x), 1, _larger)
    byte = amax_byte(_larger(amax, ACT_AMAX_FLOOR), FP8_MAX)
    return scaled_e4m3(x * ue8m0_inverse(byte)[:, None]), byte


@triton.jit(do_not_specialize=["tokens", "aligned", "max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_fp8_quant_kernel(
    p_values,  # [GROUPS, T, HEADS * D] e4m3, contiguous
    p_scale,  # [GROUPS, count, aligned] float32 or int32, contiguous
    p_o,  # [T, >= GROUPS * HEADS, D]
    p_positions,  # [>= T] int
    p_table,  # [max_pos, ROPE] float32
    o_strides,
    position_stride,
    table_strides,
    tokens,
    aligned,
    max_pos,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes BLOCK_T tokens and BLOCK_H heads of one group; blocks of heads vary first, then groups."""
    pdl_prologue(PDL, not MANY)
    # Strips in a program, of each of its tokens, and in a group.
    TILES: tl.constexpr = BLOCK_H * D // ACT_TILE
    STRIPS: tl.constexpr = HEADS * D // ACT_TILE
    block, group, first_token = _place(GROUPS, HEADS, BLOCK_T, BLOCK_H)

    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    token, head = first_token + o_row // BLOCK_H, block * BLOCK_H + o_row % BLOCK_H
    live = (token < tokens) & (head < HEADS)
    if MANY:
        # Masks take registers. What lies beyond the tokens and heads is the last one's, and not stored.
        token, head, live = tl.minimum(token, tokens - 1), tl.minimum(head, HEADS - 1), None
    x = _unrotated(
        p_o, p_positions, p_table, token, group * HEADS + head, live, o_strides, position_stride, table_strides,
        max_pos, D, ROPE,
    )  # fmt: skip

    values, byte = _quantised(tl.reshape(x, (BLOCK_T * TILES, ACT_TILE)))
    o_tile = tl.arange(0, BLOCK_T * TILES)
    token, strip = first_token + o_tile // TILES, block * TILES + o_tile % TILES
    live = (token < tokens) & (strip < STRIPS)
    p_strip = p_values + ((group * tokens + token) * STRIPS + strip)[:, None] * ACT_TILE
    tl.store(p_strip + tl.arange(0, ACT_TILE)[None, :], values, mask=live[:, None])

    if PACKED:
        WORDS: tl.constexpr = TILES // SCALES_PER_WORD
        COUNT: tl.constexpr = (STRIPS + SCALES_PER_WORD - 1) // SCALES_PER_WORD
        quads = tl.reshape(tl.where(live, byte, 0), (BLOCK_T * WORDS, SCALES_PER_WORD))
        scale = tl.sum(quads << (8 * tl.arange(0, SCALES_PER_WORD))[None, :], axis=1)
        o_word = tl.arange(0, BLOCK_T * WORDS)
        token, column = first_token + o_word // WORDS, block * WORDS + o_word % WORDS
        tl.store(p_scale + (group * COUNT + column) * aligned + token, scale, mask=(token < aligned) & (column < COUNT))
    else:
        scale = tl.where(live, byte << MANTISSA_BITS, 0).to(tl.float32, bitcast=True)
        p_one = p_scale + (group * STRIPS + strip) * aligned + token
        tl.store(p_one, scale, mask=(token < aligned) & (strip < STRIPS))


@triton.jit(do_not_specialize=["tokens", "aligned", "max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_fp8_quant_strips_kernel(
    p_values,  # as `inv_rope_fp8_quant_kernel`
    p_scale,
    p_o,
    p_positions,
    p_table,
    o_strides,
    position_stride,
    table_strides,
    tokens,
    aligned,
    max_pos,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,  # SCALES_PER_WORD strips
    ROPE: tl.constexpr,  # of the last at most
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `inv_rope_fp8_quant_kernel`, for several rows: strips of heads one by one, of which only the last turns.

    As a whole, four rows take 912 instructions, and so many registers that a program waits for memory four times in a
    row; in strips 688, and twice. What lies beyond the tokens and heads is the last one's, and not stored.
    """
    pdl_prologue(PDL, not MANY)
    STRIPS: tl.constexpr = D // ACT_TILE
    block, group, first_token = _place(GROUPS, HEADS, BLOCK_T, BLOCK_H)
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    token, head = first_token + o_row // BLOCK_H, block * BLOCK_H + o_row % BLOCK_H
    padded = (token < aligned) & (head < HEADS)
    live = (token < tokens) & (head < HEADS)
    known = tl.minimum(token, tokens - 1)

    o_k = tl.arange(0, ACT_TILE)[None, :]
    p_row = p_o + (known * o_strides[0] + (group * HEADS + tl.minimum(head, HEADS - 1)) * o_strides[1])[:, None]
    p_row += o_k.to(tl.int64) * o_strides[2]
    # All are on their way before the position is waited for, which the angles are found with.
    position = tl.load(p_positions + known * position_stride)
    strips = ()
    for strip in tl.static_range(STRIPS):
        strips += (tl.load(p_row + strip * ACT_TILE * o_strides[2]),)  # type: ignore[assignment]
    p_angles = p_table + table_row(position, max_pos)[:, None] * table_strides[0]
    cos, sin = load_cos_sin(p_angles, table_strides[1], True, ACT_TILE, ROPE)

    p_out = p_values + ((group * tokens + token) * HEADS + head)[:, None] * D + o_k
    word = tl.zeros((BLOCK_T * BLOCK_H,), tl.int32)
    for strip in tl.static_range(STRIPS):
        x = strips[strip].to(tl.float32)  # type: ignore[var-annotated]
        if strip == STRIPS - 1:
            x = rotate(x, cos, -sin, ROPE)
        values, byte = _quantised(x)
        tl.store(p_out + strip * ACT_TILE, values, mask=live[:, None])
        if PACKED:
            word |= byte << (8 * strip)
        else:
            scale = tl.where(live, byte << MANTISSA_BITS, 0).to(tl.float32, bitcast=True)
            tl.store(p_scale + ((group * HEADS + head) * STRIPS + strip) * aligned + token, scale, mask=padded)
    if PACKED:
        tl.store(p_scale + (group * HEADS + head) * aligned + token, tl.where(live, word, 0), mask=padded)


def inv_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """See the reference; the results are equal."""
    tokens, heads, dim = o.shape
    out = o.new_empty(o.shape)
    rows = _rows(tokens * heads)
    programs = tokens * cdiv(heads, rows)
    if programs == 0:
        return out
    launch_kernel(
        inv_rope_kernel,
        (programs,),
        out,
        o,
        positions,
        cos_sin_cache,
        o.stride(),
        positions.stride(0),
        cos_sin_cache.stride(),
        cos_sin_cache.shape[0],
        HEADS=heads,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        BLOCK_H=rows,
        num_warps=1,
        enable_fp_fusion=False,
        **pdl_arguments(o.device, programs),
    )
    return out


def inv_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    n_groups: int,
    heads_per_group: int,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See the reference; values, scales and the zero rows after T are equal, and so are the strides."""
    tokens, _, dim = o.shape
    size = heads_per_group * dim
    count = cdiv(size, _ACT_TILE * (_SCALES_PER_WORD if packed_scales else 1))
    strides = scale_strides(tokens, count)
    values = o.new_empty((n_groups, tokens, size), dtype=torch.float8_e4m3fn)
    scale = o.new_empty((n_groups, count, strides[2]), dtype=torch.int32 if packed_scales else torch.float32)
    rows = tokens * n_groups * heads_per_group
    many = rows > FEW_ROWS
    block_t, block_h = _block(rows)
    # A program fills whole strips, and whole words of scales.
    block_h = max(block_h, cdiv(_ACT_TILE * (_SCALES_PER_WORD if packed_scales else 1), dim))
    programs = cdiv(strides[2], block_t) * n_groups * cdiv(heads_per_group, block_h)
    by_strips = rows > SPREAD_ROWS and dim == _SCALES_PER_WORD * _ACT_TILE and cos_sin_cache.shape[1] <= _ACT_TILE
    if programs > 0:
        launch_kernel(
            inv_rope_fp8_quant_strips_kernel if by_strips else inv_rope_fp8_quant_kernel,
            (programs,),
            values,
            scale,
            o,
            positions,
            cos_sin_cache,
            o.stride(),
            positions.stride(0),
            cos_sin_cache.stride(),
            tokens,
            strides[2],
            cos_sin_cache.shape[0],
            GROUPS=n_groups,
            HEADS=heads_per_group,
            D=dim,
            ROPE=cos_sin_cache.shape[1],
            PACKED=packed_scales,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
            MANY=many,
            num_warps=1,
            **register_limit(o.device, STRIPS_REGISTERS if by_strips else 0),
            enable_fp_fusion=False,
            **pdl_arguments(o.device, 0 if many else programs),
        )
    return (
        values.as_strided((tokens, n_groups, size), value_strides(tokens, size)),
        scale.as_strided((tokens, n_groups, count), strides),
    )


def inv_rope_refuses(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> str:
    """Why a call cannot use the kernel, or ""."""
    dim = o.shape[2]
    if isinstance(dim, int) and (dim < 2 or dim & (dim - 1)):
        return f"the head dim {dim} is not a power of two"
    return ""


def inv_rope_fp8_quant_refuses(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    n_groups: int,
    heads_per_group: int,
    packed_scales: bool = False,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return inv_rope_refuses(o, positions, cos_sin_cache) or why_unsupported_fp8(o.device)


def _rows(rows: int) -> int:
    """Heads of a program of `inv_rope` by the number of heads in all."""
    return 1 if rows <= SPREAD_ROWS else 2


def _block(rows: int) -> tuple[int, int]:
    """Tokens and heads of a program of `inv_rope_fp8_quant` by the number of heads in all: a warp has no registers for
    what eight load."""
    return (1, 1) if rows <= SPREAD_ROWS else (2, 1) if rows <= FEW_ROWS else (4, 1)
