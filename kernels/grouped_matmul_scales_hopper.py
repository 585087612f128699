"""Scales in a Hopper product of few e4m3 tokens: how a program has those of all its strips, and sums take them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .. import layout
from .quant_hopper import scale_value
from .views_hopper import FLAT, reinterpret

WORD = gl.constexpr(layout.SCALES_PER_WORD)
WEIGHT_TILE = gl.constexpr(layout.WEIGHT_TILE)


@gluon.jit
def scales_of_weight(
    p_scale, row_stride, strip_stride, first_row, block, rows, begin, count, ONE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """float32 `[EACH, 1 or BLOCK_N]` of float32, or of UE8M0 bytes: of a block of the rows that start at `first_row`.

    What lies past the end repeats the last strip and row.
    """
    WIDE: gl.constexpr = 1 if ONE_SCALE else BLOCK_N
    LANES: gl.constexpr = 1 if ONE_SCALE else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    strip = begin + gl.minimum(gl.arange(0, EACH, gl.SliceLayout(1, SCALES)), count - 1)
    o_n = gl.arange(0, WIDE, gl.SliceLayout(0, SCALES))
    row = first_row + gl.minimum(block * BLOCK_N + o_n, rows - 1)
    p_scale += gl.expand_dims(row // WEIGHT_TILE * row_stride, 0)
    p_scale += gl.expand_dims(strip * strip_stride, 1)
    scale = gl.load(p_scale)
    if p_scale.dtype.element_ty == gl.uint8:
        scale = scale_value(scale.to(gl.int32))
    return scale


@gluon.jit
def scales_of_x(
    p_scale, token_stride, strip_stride, tokens, first_token, begin, count, BLOCK_M: gl.constexpr, EACH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """float32 `[EACH, BLOCK_M]` of a program's strips. What lies past the end repeats the last strip and token."""
    TOKENS: gl.constexpr = BLOCK_M if BLOCK_M < 32 else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TOKENS, TOKENS], [WARPS, 1], [1, 0])
    token = gl.minimum(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCALES)), tokens - 1).to(gl.int64)
    strip = begin + gl.minimum(gl.arange(0, EACH, gl.SliceLayout(1, SCALES)), count - 1)
    p_scale += gl.expand_dims(token * token_stride, 0)
    if p_scale.dtype.element_ty == gl.int32:
        # Words hold the UE8M0 bytes of four strips.
        words = gl.load(p_scale + gl.expand_dims(strip // WORD * strip_stride, 1))
        known = scale_value((words >> gl.expand_dims(8 * (strip % WORD), 1)) & 255)
    else:
        known = gl.load(p_scale + gl.expand_dims(strip * strip_stride, 1))
    return known


@gluon.jit
def put_rows(x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """float32 `[ROWS, WIDTH]` in shared memory, where each row can be asked for."""
    flat = gl.allocate_shared_memory(gl.float32, [ROWS * WIDTH], FLAT)
    flat.store(gl.reshape(x, [ROWS * WIDTH]))
    return reinterpret(flat, gl.float32, [ROWS, WIDTH], FLAT)


@gluon.jit
def add_scaled(acc, products, x_scales, w_scales, first, count, TURN: gl.constexpr):
    """`acc` and the products of the TURN strips from `first` on, as each is done; of those behind the last, nothing."""
    ACC: gl.constexpr = acc.type.layout
    for ahead in gl.static_range(TURN):
        strip = gl.minimum(first + ahead, count - 1)
        x_scale = x_scales.index(strip).load(gl.SliceLayout(0, ACC))
        row_scale = w_scales.index(strip).load(gl.SliceLayout(1, ACC))
        if TURN > 1:
            x_scale = gl.where(first + ahead < count, x_scale, 0.0)
            row_scale = gl.where(first + ahead < count, row_scale, 0.0)
        product = warpgroup_mma_wait(TURN - 1 - ahead, deps=[products[ahead]])
        acc += product * (gl.expand_dims(x_scale, 0) * gl.expand_dims(row_scale, 1))
    return acc
