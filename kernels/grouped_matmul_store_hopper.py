"""How a program of a product of few tokens on Hopper gets rid of its sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .cluster_hopper import cluster_arrive, cluster_wait, put_words, words_of
from .kv_load_hopper import thread_barrier

PART_PAD = 4
"""Words behind each token of a part in shared memory: the threads of a warp then store to different banks."""

PAD = gl.constexpr(PART_PAD)


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


@gluon.jit
def store_shares(
    acc, part, rank, p_out, out_stride, tokens, first_token, group, block, rows,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of which SPLITS programs of a cluster have a part each: they add up a share of the tokens each.

    `rank` is the place of this program in the cluster. That of part 0 is `part` places in front of it.
    """
    ACC: gl.constexpr = acc.type.layout
    # Shares are a power of two. With 3, 5, 6 or 7 programs, some have none.
    SHARES: gl.constexpr = 8 if SPLITS >= 8 else 4 if SPLITS >= 4 else 2 if SPLITS >= 2 else 1
    SHARE: gl.constexpr = BLOCK_M // SHARES
    LANES: gl.constexpr = 32 if BLOCK_N >= 128 else BLOCK_N // 4
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    # All have multiplied what lies there now.
    thread_barrier()
    put_words(acc, 4 * (o_m * (BLOCK_N + PAD) + o_n))
    cluster_arrive()
    cluster_wait()
    o_m = gl.expand_dims(part * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, OUT)), 1)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT)), 0)
    if (part < SHARES) & (first_token + part * SHARE < tokens):
        wanted = (first_token + o_m < tokens) & (block * BLOCK_N + o_n < rows)
        total = gl.zeros([SHARE, BLOCK_N], gl.float32, OUT)
        for other in gl.static_range(SPLITS):
            words = words_of(rank - part + other, 4 * (o_m * (BLOCK_N + PAD) + o_n), wanted.to(gl.int32))
            total += words
        o_column = group.to(gl.int64) * rows + block * BLOCK_N + o_n
        p_tile = p_out + ((first_token + o_m).to(gl.int64) * out_stride + o_column)
        gl.store(p_tile, total.to(p_out.dtype.element_ty), mask=wanted)
    # Nobody ends before all have read.
    cluster_arrive()
    cluster_wait()
