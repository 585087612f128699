"""How a program of a product of few tokens on Hopper gets rid of its sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import layout
from .barriers_hopper import thread_barrier
from .quant_hopper import quantised

STRIP = gl.constexpr(layout.ACT_TILE)


@gluon.jit
def store_sums(y, token, first_column, live, p_out, p_out_scale, out_stride, tokens, rows, AXIS: gl.constexpr):
    """Store a tile whose columns, from `first_column` of all on, lie along AXIS, for those of `token` that are `live`.

    Of sums that are quantised, a tile has one whole strip.
    """
    COLUMNS: gl.constexpr = y.shape[AXIS]
    o_m = gl.expand_dims(token, AXIS).to(gl.int64)
    o_n = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1 - AXIS, y.type.layout)), 1 - AXIS)
    p_tile = p_out + (o_m * out_stride + (first_column + o_n))
    wanted = gl.expand_dims(live, AXIS) & (o_n < rows)
    if p_out_scale is None:
        gl.store(p_tile, y.to(p_out.dtype.element_ty), mask=wanted)
    else:
        gl.static_assert(COLUMNS == STRIP)
        values, scale = quantised(y.to(gl.bfloat16).to(gl.float32), AXIS)
        gl.store(p_tile, values, mask=wanted)
        gl.store(p_out_scale + (first_column // STRIP * tokens + token), scale, mask=live)


@gluon.jit
def store_tile(
    acc, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OUT: gl.constexpr, OUT_TILE: gl.constexpr,
):  # fmt: skip
    """A tile `[BLOCK_N, BLOCK_M]`, turned on its way through shared memory: outputs of a token are neighbours."""
    ROUNDED: gl.constexpr = p_out.dtype.element_ty if p_out_scale is None else gl.bfloat16
    tile = gl.allocate_shared_memory(ROUNDED, [BLOCK_M, BLOCK_N], OUT_TILE)
    tile.permute((1, 0)).store(acc.to(ROUNDED))
    thread_barrier()
    token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    store_sums(
        tile.load(OUT), token, first_column, token < tokens, p_out, p_out_scale, out_stride, tokens,
        rows - block * BLOCK_N, 1,
    )  # fmt: skip


@gluon.jit
def store_parts(
    acc, part, tile, tiles, p_out, p_out_scale, p_part, p_arrived, out_stride, tokens, first_token, group, block, rows,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OUT: gl.constexpr, OUT_TILE: gl.constexpr,
):  # fmt: skip
    """A tile of which each of SPLITS programs has a part: the last of them to arrive adds them up, in their order."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    # Eight tokens at a time: what a warp stores together lies together.
    p_part += tile.to(gl.int64) * (BLOCK_N * BLOCK_M) + ((o_m // 8 * BLOCK_N + o_n) * 8 + o_m % 8)
    part_stride = tiles.to(gl.int64) * (BLOCK_N * BLOCK_M)
    gl.store(p_part + part * part_stride, acc)
    # Every thread has stored before one announces it.
    thread_barrier()
    if gl.atomic_add(p_arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
        for other in gl.static_range(SPLITS):
            acc += gl.load(p_part + other * part_stride, cache_modifier=".cg")
        store_tile(
            acc, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows, BLOCK_M, BLOCK_N, OUT,
            OUT_TILE,
        )  # fmt: skip
        gl.store(p_arrived + tile, 0)
