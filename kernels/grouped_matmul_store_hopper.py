"""How a program of a product of few tokens on Hopper gets rid of its sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .kv_load_hopper import thread_barrier


@gluon.jit
def store_tile(
    acc, p_out, out_stride, tokens, first_token, group, block, rows,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OUT: gl.constexpr, OUT_TILE: gl.constexpr,
):  # fmt: skip
    """A tile `[BLOCK_N, BLOCK_M]`, turned on its way through shared memory: outputs of a token are neighbours."""
    tile = gl.allocate_shared_memory(p_out.dtype.element_ty, [BLOCK_M, BLOCK_N], OUT_TILE)
    tile.permute((1, 0)).store(acc.to(p_out.dtype.element_ty))
    thread_barrier()
    o_m = gl.expand_dims(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT)), 1)
    o_n = gl.expand_dims(block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT)), 0)
    p_tile = p_out + (o_m.to(gl.int64) * out_stride + (group.to(gl.int64) * rows + o_n))
    gl.store(p_tile, tile.load(OUT), mask=(o_m < tokens) & (o_n < rows))


@gluon.jit
def store_parts(
    acc, part, tile, tiles, p_out, p_part, p_arrived, out_stride, tokens, first_token, group, block, rows,
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
        store_tile(acc, p_out, out_stride, tokens, first_token, group, block, rows, BLOCK_M, BLOCK_N, OUT, OUT_TILE)
        gl.store(p_arrived + tile, 0)
