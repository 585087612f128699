"""Kernels and launchers of `inv_rope` and `inv_rope_fp8_quant`; the reference defines the layouts of their scales.

A program takes one or a few heads of one token, or with quantisation of a few tokens, whose scales are neighbours in
memory and are written together. More heads are quantised tile by tile, which needs fewer registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .common import Rope

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)
SCALES_PER_WORD = tl.constexpr(_SCALES_PER_WORD)
ONE_HEAD_ROWS, TWO_HEAD_ROWS = 768, 4096
"""Most heads of all tokens for one head per program, and for two; above, four with quantisation."""
BY_TILE_REGISTERS = 72
"""Register limit of the kernel that goes tile by tile: 28 warps fit an SM. With 64, loads of scales serialise."""


class Strides(NamedTuple):
    """Strides of the heads, of positions, and of the RoPE table."""

    o: tuple[int, ...]
    positions: int
    table: tuple[int, ...]


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        heads, dim, rope: heads of a token, or of a group; their dims, and how many of them are rotated.
        block_t, block_h: tokens and heads of a program.
        groups, packed, many: groups of heads; whether scales are packed, and whether the launch is too large for PDL.
    """

    heads: int
    dim: int
    rope: int
    block_h: int
    block_t: int = 1
    groups: int = 1
    packed: bool = False
    many: bool = False


class QuantTensors(NamedTuple):
    """Tensors of a quantisation.

    Attributes:
        p_values: `[groups, T, heads * dim]` e4m3, contiguous.
        p_scale: `[groups, count, aligned]` float32 or int32, contiguous.
        p_o: `[T, >= groups * heads, dim]`.
    """

    p_values: Any
    p_scale: Any
    p_o: Any


@triton.jit
def _larger(a, b):
    """Return the larger of two magnitudes, NaN if one is NaN. Float comparisons save an instruction for the sign."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rotate_back(p_o, o_strides, token, head, live, rope, D: tl.constexpr, ROPE: tl.constexpr):
    """Load `head` `[N]` of `token` `[N]` and rotate its last ROPE dims back: float32 `[N, D]`.

    Rows are 0 where not `live` `[N]`, which may be None.
    """
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    p_x = p_o + (token * o_strides[0] + head.to(tl.int64) * o_strides[1])[:, None] + o_d * o_strides[2]
    if live is None:
        position, x = tl.load(rope.p_positions + token * rope.position_stride), tl.load(p_x)
        m_row = True
    else:
        position = tl.load(rope.p_positions + token * rope.position_stride, mask=live, other=0)
        x = tl.load(p_x, mask=live[:, None], other=0.0)
        m_row = live[:, None]
    p_row = rope.p_table + table_row(position, rope.max_pos)[:, None] * rope.table_strides[0]
    cos, sin = load_cos_sin(p_row, rope.table_strides[1], m_row, D, ROPE)
    return rotate(x.to(tl.float32), cos, -sin, ROPE)


@triton.jit(do_not_specialize=["max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_kernel(
    p_out,  # [T, heads, dim] contiguous
    p_o,  # [T, heads, dim]
    p_positions,  # [>= T] int
    p_table,  # [max_pos, rope] float32
    strides,
    max_pos,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate block_h heads of token p // BLOCKS back."""
    pdl_prologue(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.dim
    BLOCK_H: tl.constexpr = SHAPE.block_h
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) + tl.zeros((BLOCK_H,), tl.int64)
    head = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < HEADS
    rope = Rope(p_positions, strides.positions, p_table, strides.table, max_pos)
    x = _rotate_back(p_o, strides.o, token, head, live, rope, D, SHAPE.rope)
    p_row = p_out + (token * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(p_row, x.to(p_out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _block_of_program(SHAPE: tl.constexpr):
    """Return a program's block of heads, its group and its first token, the last two as int64."""
    GROUPS: tl.constexpr = SHAPE.groups
    BLOCK_T: tl.constexpr = SHAPE.block_t
    BLOCKS: tl.constexpr = (SHAPE.heads + SHAPE.block_h - 1) // SHAPE.block_h
    program = tl.program_id(0)
    group = (program // BLOCKS % GROUPS).to(tl.int64)
    return program % BLOCKS, group, (program // (BLOCKS * GROUPS)).to(tl.int64) * BLOCK_T


@triton.jit
def _quantize_tiles(x):
    """Quantise float32 tiles `x` `[N, ACT_TILE]` to e4m3; return them and their UE8M0 bytes, int32 `[N]`."""
    amax = tl.reduce(tl.abs(x), 1, _larger)
    byte = amax_byte(_larger(amax, ACT_AMAX_FLOOR), FP8_MAX)
    return scaled_e4m3(x * ue8m0_inverse(byte)[:, None]), byte


@triton.jit(do_not_specialize=["tokens", "aligned", "max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_fp8_quant_kernel(
    tensors,
    p_positions,  # [>= T] int
    p_table,  # [max_pos, rope] float32
    strides,
    tokens,
    aligned,
    max_pos,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise block_h heads of one group of block_t tokens; blocks of heads vary first, then groups."""
    pdl_prologue(PDL, not SHAPE.many)
    p_values, p_scale, p_o = tensors
    HEADS: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.dim
    BLOCK_T: tl.constexpr = SHAPE.block_t
    BLOCK_H: tl.constexpr = SHAPE.block_h
    TILES: tl.constexpr = BLOCK_H * D // ACT_TILE  # of a token in this program
    GROUP_TILES: tl.constexpr = HEADS * D // ACT_TILE
    block, group, first_token = _block_of_program(SHAPE)

    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    token, head = first_token + o_row // BLOCK_H, block * BLOCK_H + o_row % BLOCK_H
    live = (token < tokens) & (head < HEADS)
    if SHAPE.many:
        # Masks take registers: rows past the last token or head repeat it instead, and are not stored.
        token, head, live = tl.minimum(token, tokens - 1), tl.minimum(head, HEADS - 1), None
    rope = Rope(p_positions, strides.positions, p_table, strides.table, max_pos)
    x = _rotate_back(p_o, strides.o, token, group * HEADS + head, live, rope, D, SHAPE.rope)

    values, byte = _quantize_tiles(tl.reshape(x, (BLOCK_T * TILES, ACT_TILE)))
    o_tile = tl.arange(0, BLOCK_T * TILES)
    token, tile = first_token + o_tile // TILES, block * TILES + o_tile % TILES
    live = (token < tokens) & (tile < GROUP_TILES)
    p_tile = p_values + ((group * tokens + token) * GROUP_TILES + tile)[:, None] * ACT_TILE
    tl.store(p_tile + tl.arange(0, ACT_TILE)[None, :], values, mask=live[:, None])

    if SHAPE.packed:
        WORDS: tl.constexpr = TILES // SCALES_PER_WORD
        COUNT: tl.constexpr = (GROUP_TILES + SCALES_PER_WORD - 1) // SCALES_PER_WORD
        quads = tl.reshape(tl.where(live, byte, 0), (BLOCK_T * WORDS, SCALES_PER_WORD))
        scale = tl.sum(quads << (8 * tl.arange(0, SCALES_PER_WORD))[None, :], axis=1)
        o_word = tl.arange(0, BLOCK_T * WORDS)
        token, column = first_token + o_word // WORDS, block * WORDS + o_word % WORDS
        tl.store(p_scale + (group * COUNT + column) * aligned + token, scale, mask=(token < aligned) & (column < COUNT))
    else:
        scale = tl.where(live, byte << MANTISSA_BITS, 0).to(tl.float32, bitcast=True)
        p_one = p_scale + (group * GROUP_TILES + tile) * aligned + token
        tl.store(p_one, scale, mask=(token < aligned) & (tile < GROUP_TILES))


@triton.jit(do_not_specialize=["tokens", "aligned", "max_pos"], do_not_specialize_on_alignment=["p_positions"])
def inv_rope_fp8_quant_by_tile_kernel(
    tensors,
    p_positions,  # [>= T] int
    p_table,  # [max_pos, rope] float32
    strides,
    tokens,
    aligned,
    max_pos,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise several rows tile by tile; heads are SCALES_PER_WORD tiles, only the last one rotated.

    This needs fewer instructions and registers than whole rows do, so that loads do not wait for each other. Rows past
    the last token or head repeat it, and are not stored.
    """
    pdl_prologue(PDL, not SHAPE.many)
    p_values, p_scale, p_o = tensors
    HEADS: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.dim
    BLOCK_T: tl.constexpr = SHAPE.block_t
    BLOCK_H: tl.constexpr = SHAPE.block_h
    TILES: tl.constexpr = D // ACT_TILE
    block, group, first_token = _block_of_program(SHAPE)
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    token, head = first_token + o_row // BLOCK_H, block * BLOCK_H + o_row % BLOCK_H
    padded = (token < aligned) & (head < HEADS)
    live = (token < tokens) & (head < HEADS)
    known = tl.minimum(token, tokens - 1)

    o_k = tl.arange(0, ACT_TILE)[None, :]
    p_row = p_o + (known * strides.o[0] + (group * HEADS + tl.minimum(head, HEADS - 1)) * strides.o[1])[:, None]
    p_row += o_k.to(tl.int64) * strides.o[2]
    # Issued before the angles, which depend on the position.
    position = tl.load(p_positions + known * strides.positions)
    tiles = ()
    for tile in tl.static_range(TILES):
        tiles += (tl.load(p_row + tile * ACT_TILE * strides.o[2]),)  # type: ignore[assignment]
    p_angles = p_table + table_row(position, max_pos)[:, None] * strides.table[0]
    cos, sin = load_cos_sin(p_angles, strides.table[1], True, ACT_TILE, SHAPE.rope)

    p_out = p_values + ((group * tokens + token) * HEADS + head)[:, None] * D + o_k
    word = tl.zeros((BLOCK_T * BLOCK_H,), tl.int32)
    for tile in tl.static_range(TILES):
        x = tiles[tile].to(tl.float32)  # type: ignore[var-annotated]
        if tile == TILES - 1:
            x = rotate(x, cos, -sin, SHAPE.rope)
        values, byte = _quantize_tiles(x)
        tl.store(p_out + tile * ACT_TILE, values, mask=live[:, None])
        if SHAPE.packed:
            word |= byte << (8 * tile)
        else:
            scale = tl.where(live, byte << MANTISSA_BITS, 0).to(tl.float32, bitcast=True)
            tl.store(p_scale + ((group * HEADS + head) * TILES + tile) * aligned + token, scale, mask=padded)
    if SHAPE.packed:
        tl.store(p_scale + (group * HEADS + head) * aligned + token, tl.where(live, word, 0), mask=padded)


def inv_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Launch `inv_rope`; results equal the reference bit for bit."""
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
        Strides(o.stride(), positions.stride(0), cos_sin_cache.stride()),
        cos_sin_cache.shape[0],
        SHAPE=Shape(heads, dim, cos_sin_cache.shape[1], rows),
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
    """Launch `inv_rope_fp8_quant`; values, scales, the zero rows after T and strides equal the reference."""
    tokens, _, dim = o.shape
    size = heads_per_group * dim
    count = cdiv(size, _ACT_TILE * (_SCALES_PER_WORD if packed_scales else 1))
    strides = scale_strides(tokens, count)
    values = o.new_empty((n_groups, tokens, size), dtype=torch.float8_e4m3fn)
    scale = o.new_empty((n_groups, count, strides[2]), dtype=torch.int32 if packed_scales else torch.float32)
    rows = tokens * n_groups * heads_per_group
    many = rows > TWO_HEAD_ROWS
    block_t, block_h = _block(rows)
    # A program fills whole tiles, and whole words of scales.
    block_h = max(block_h, cdiv(_ACT_TILE * (_SCALES_PER_WORD if packed_scales else 1), dim))
    programs = cdiv(strides[2], block_t) * n_groups * cdiv(heads_per_group, block_h)
    by_tile = rows > ONE_HEAD_ROWS and dim == _SCALES_PER_WORD * _ACT_TILE and cos_sin_cache.shape[1] <= _ACT_TILE
    if programs > 0:
        launch_kernel(
            inv_rope_fp8_quant_by_tile_kernel if by_tile else inv_rope_fp8_quant_kernel,
            (programs,),
            QuantTensors(values, scale, o),
            positions,
            cos_sin_cache,
            Strides(o.stride(), positions.stride(0), cos_sin_cache.stride()),
            tokens,
            strides[2],
            cos_sin_cache.shape[0],
            SHAPE=Shape(heads_per_group, dim, cos_sin_cache.shape[1], block_h, block_t, n_groups, packed_scales, many),
            num_warps=1,
            **register_limit(o.device, BY_TILE_REGISTERS if by_tile else 0),
            enable_fp_fusion=False,
            **pdl_arguments(o.device, 0 if many else programs),
        )
    return (
        values.as_strided((tokens, n_groups, size), value_strides(tokens, size)),
        scale.as_strided((tokens, n_groups, count), strides),
    )


def why_unsupported_inv_rope(o: Tensor, *_: Any, **__: Any) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    dim = o.shape[2]
    if isinstance(dim, int) and (dim < 2 or dim & (dim - 1)):
        return f"the head dim {dim} is not a power of two"
    return ""


def why_unsupported_inv_rope_fp8_quant(o: Tensor, *_: Any, **__: Any) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    return why_unsupported_inv_rope(o) or why_unsupported_fp8(o.device)


def _rows(rows: int) -> int:
    """Return the heads of a program of `inv_rope` by the number of heads of all tokens."""
    return 1 if rows <= ONE_HEAD_ROWS else 2


def _block(rows: int) -> tuple[int, int]:
    """Return tokens and heads of a program of `inv_rope_fp8_quant` by the number of heads of all tokens.

    A warp has no registers for eight heads.
    """
    return (1, 1) if rows <= ONE_HEAD_ROWS else (2, 1) if rows <= TWO_HEAD_ROWS else (4, 1)
