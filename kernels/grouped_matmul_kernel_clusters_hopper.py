"""The matrix product of many tokens and few tiles on Hopper, in Gluon: a cluster of programs shares each tile.

As in grouped_matmul_kernel_many_hopper.py two warpgroups multiply 64 tokens each. What brings strips is a warpgroup
too, for all threads of a program meet those of its cluster: when a tile's strips have been multiplied, each program
puts its sums in shared memory, where the strips were, and the others fetch their shares of the tokens. Parts are added
in their order, so that a product has the same bits every time.

A launch may be two products of one x: of x quantised with e4m3, and, from program `first` on, of x as it is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .barriers_hopper import thread_barrier
from .cluster_hopper import meet, put_pairs
from .copies_hopper import copy_elements, copy_tile
from .grouped_matmul_kernel_hopper import STRIP
from .grouped_matmul_kernel_many_hopper import HALF, ROWS, TILE_ROWS, half_of, sums_of, tokens_of, word_of
from .grouped_matmul_shares_hopper import store_fetched
from .grouped_matmul_store_hopper import store_sums
from .views_hopper import FLAT, reinterpret

RESULTS_TOGETHER = 8
"""Rows of either weight are a multiple of this."""
PAD = 8
"""Words behind each token of a part: the pairs of half a warp then go to different banks."""

COLUMNS_TOGETHER = gl.constexpr(RESULTS_TOGETHER)
WARPS = gl.constexpr(4)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of the warpgroup that brings
THREADS = gl.constexpr(128)
PITCH = gl.constexpr(TILE_ROWS + PAD)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_ROWS, 16]))


@gluon.jit
def _bring(
    weights, inputs, p_x_scale, p_weight_scale, strides, place, rings, ready, free,
    BLOCK_K: gl.constexpr, RING: gl.constexpr, HALVES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The strips of a part of a tile."""
    w_ring, x_ring, x_scales, w_scales = rings
    x_group_row, x_group_column, x_token, x_group, x_strip, w_row, w_strip = strides
    tokens, first_token, group, row, _, _, begin, count = place
    BYTES: gl.constexpr = (ROWS + HALVES * HALF) * STRIP
    ahead = gl.minimum(count, AHEAD)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        copy_tile(weights, [row, (begin + i) * BLOCK_K], ready.index(i), w_ring.index(i))
    gdc_launch_dependents()
    gdc_wait()
    x_row, x_column = group * x_group_row, group * x_group_column
    if p_x_scale is not None:
        token = tokens_of(gl.arange(0, HALVES * HALF, LANES), first_token, tokens).to(gl.int64)
        p_scales = p_x_scale + group.to(gl.int64) * x_group + token * x_token
        p_scale = p_weight_scale + (row // ROWS * w_row + gl.arange(0, 1, LANES))
    for i in range(count):
        slot = i % RING
        strip = begin + i
        if i >= ahead:
            if i >= RING:
                mbarrier.wait(free.index(slot), ((i // RING) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BYTES)
            copy_tile(weights, [row, strip * BLOCK_K], ready.index(slot), w_ring.index(slot))
        for half in gl.static_range(HALVES):
            at = [x_row + half_of(half, first_token, tokens), x_column + strip * BLOCK_K]
            copy_tile(inputs, at, ready.index(slot), x_ring.index(HALVES * slot + half))
        if p_x_scale is not None:
            x_word, w_word = word_of(p_scales, strip), word_of(p_scale, strip)
            copy_elements(x_scales.index(slot), p_scales + x_word * x_strip)
            copy_elements(w_scales.index(slot), p_scale + w_word * w_strip)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def _sums(rings, ready, free, half: gl.constexpr, begin, count, BLOCK_K: gl.constexpr, RING: gl.constexpr):
    """`sums_of` a part of a tile. Both products have theirs in the same registers."""
    acc, _ = sums_of(rings, (ready, free, None), half, 0, begin, count, BLOCK_K, RING)
    return gl.convert_layout(acc, SUMS)


@gluon.jit
def _put(acc, half: gl.constexpr):
    """Put sums where the cluster can fetch them."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, ACC)), 1) + half * HALF
    o_n = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, ACC)), 0)
    put_pairs(acc, 4 * (o_m * PITCH + o_n))


@gluon.jit
def _store_half(acc, p_out, p_out_scale, out_stride, place, half: gl.constexpr):
    """All of one half of the tokens, whose sums are complete."""
    tokens, first_token, _, _, out_column, columns, _, _ = place
    token = half_of(half, first_token, tokens) + gl.arange(0, HALF, gl.SliceLayout(1, acc.type.layout))
    store_sums(acc, token, out_column, token < tokens, p_out, p_out_scale, out_stride, tokens, columns, 1)


@gluon.jit
def _store_share(
    p_out, p_out_scale, out_stride, place, share, alone, rank, half: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Share number `share` of one half of the tokens. For `alone` and `rank` see `store_fetched`."""
    SHARE: gl.constexpr = (HALF + 2 * SPLITS - 1) // (2 * SPLITS) * 2
    tokens, first_token, _, _, out_column, columns, _, _ = place
    first, half_token = share * SHARE, half_of(half, first_token, tokens)
    mine = gl.minimum(gl.minimum(SHARE, HALF - first), tokens - half_token - first)
    store_fetched(
        p_out, p_out_scale, out_stride, tokens, half_token - half * HALF, half * HALF + first, mine, out_column,
        columns, SPLITS, SHARE, ROWS, PITCH, WARPS, alone, rank,
    )  # fmt: skip


@gluon.jit
def _multiply_half(
    p_out, p_out_scale, out_stride, others, alone, place, part, rings, rings_of_others, ready, free,
    half: gl.constexpr, SPLITS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_K_OF_OTHERS: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    """The sums of one half of the tokens, and all of its share of them."""
    begin, count = place[6], place[7]
    if BLOCK_K_OF_OTHERS == 0:
        acc = _sums(rings, ready, free, half, begin, count, BLOCK_K, RING)
    else:
        if others:
            acc = _sums(rings_of_others, ready, free, half, begin, count, BLOCK_K_OF_OTHERS, RING)
        else:
            acc = _sums(rings, ready, free, half, begin, count, BLOCK_K, RING)
    if SPLITS == 1:
        _store_half(acc, p_out, p_out_scale, out_stride, place, half)
    else:
        # The other half has multiplied what lies there, too.
        last = count - 1
        mbarrier.wait(free.index(last % RING), (last // RING) & 1)
        _put(acc, half)
        meet(True)
        if alone is None:
            _store_share(p_out, p_out_scale, out_stride, place, part, None, None, half, SPLITS)
        else:
            # In a loop, for code comes from memory: a whole tile's shares are all this program's.
            for share in range(gl.where(alone, 0, part), gl.where(alone, SPLITS, part + 1)):
                _store_share(p_out, p_out_scale, out_stride, place, share, alone, part, half, SPLITS)
        # Nobody ends before all have read: what is stored has been.
        thread_barrier()
        meet(False)


@gluon.jit
def _multiply(
    p_out, p_out_scale, out_stride, others, alone, place, part, rings, rings_of_others, ready, free,
    half: gl.constexpr, SPLITS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_K_OF_OTHERS: gl.constexpr,
    RING: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A warpgroup, which has nothing to do where there are no tokens for it."""
    if half < HALVES:
        _multiply_half(
            p_out, p_out_scale, out_stride, others, alone, place, part, rings, rings_of_others, ready, free, half,
            SPLITS, BLOCK_K, BLOCK_K_OF_OTHERS, RING,
        )  # fmt: skip
    else:
        _idle(SPLITS)


@gluon.jit
def _idle(SPLITS: gl.constexpr):
    """A warpgroup that has no sums, while others add theirs up: a cluster meets with all of its threads."""
    if SPLITS > 1:
        meet(True)
        meet(False)


@gluon.jit
def _bring_all(
    weights, inputs, others, inputs_of_others, p_x_scale, p_weight_scale, strides, is_others, place, rings,
    rings_of_others, ready, free, SPLITS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_K_OF_OTHERS: gl.constexpr,
    RING: gl.constexpr, HALVES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The strips of a part of a tile of either product."""
    if others is None:
        _bring(
            weights, inputs, p_x_scale, p_weight_scale, strides, place, rings, ready, free, BLOCK_K, RING, HALVES, AHEAD
        )
    else:
        if is_others:
            _bring(
                others, inputs_of_others, None, None, strides, place, rings_of_others, ready, free, BLOCK_K_OF_OTHERS,
                RING, HALVES, AHEAD,
            )  # fmt: skip
        else:
            _bring(
                weights, inputs, p_x_scale, p_weight_scale, strides, place, rings, ready, free, BLOCK_K, RING, HALVES,
                AHEAD,
            )  # fmt: skip
    _idle(SPLITS)


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_strip_stride",
        "tokens", "token_blocks", "first", "whole",
    ]
)  # fmt: skip
def grouped_matmul_clusters_hopper_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [128, BLOCK_K]
    inputs,  # descriptor of rows of x in blocks of [64, BLOCK_K]
    others,  # descriptor of [M, K] in blocks of [128, BLOCK_K_OF_OTHERS], or None
    inputs_of_others,  # descriptor of rows of x as it is in blocks of [64, BLOCK_K_OF_OTHERS], or None
    p_out,  # [T, G * N + M], rows contiguous
    p_out_scale,  # of e4m3 results, float32 [G * N / 128, T], contiguous; or None
    p_x_scale,  # [T, G, strips] float32, [T, G, words] int32, or None
    p_weight_scale,  # [blocks, strips] float32, [blocks, words] int32, or None
    out_stride,  # of a token
    x_group_row,  # where a group's part of `inputs` starts, in units of the group
    x_group_column,
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_strip_stride,
    weight_scale_row_stride,
    weight_scale_strip_stride,
    tokens,
    token_blocks,  # tiles that the tokens take
    rows,  # N, a multiple of 128 where there are several groups
    rows_of_others,  # M
    strips,  # of K
    strips_of_others,
    strips_each,  # of a program
    strips_each_of_others,
    first,  # program of the others
    whole,  # program of the first tile that is whole, 0 or SPLITS; None where all are shared
    SPLITS: gl.constexpr,  # programs of a cluster; 1 where each has a tile by itself
    BLOCK_K: gl.constexpr,
    BLOCK_K_OF_OTHERS: gl.constexpr,
    RING: gl.constexpr,
    HALVES: gl.constexpr,  # of a tile's tokens, 1 where a half holds all
    AHEAD: gl.constexpr,  # strips of the weight that are asked for before the kernel in front has ended
    TILE: gl.constexpr,  # layouts in shared memory
    TILE_OF_OTHERS: gl.constexpr,
    MULTIPLIER_REGISTERS: gl.constexpr,
    BRINGER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs p of a cluster take the parts of tile p // SPLITS: each `strips_each` strips, the last what is left.

    From `whole` on, where that is given, a program takes all of a tile of the first weight. What a cluster in front of
    them shares is tile 0, whose tokens are in no other tile if tiles are odd: see half_of.
    """
    w_ring = gl.allocate_shared_memory(weights.dtype, [RING, ROWS, BLOCK_K], TILE)
    x_ring = gl.allocate_shared_memory(inputs.dtype, [HALVES * RING, HALF, BLOCK_K], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    if p_x_scale is not None:
        x_scales = gl.allocate_shared_memory(p_x_scale.dtype.element_ty, [RING, HALVES * HALF], FLAT)
        w_scales = gl.allocate_shared_memory(p_weight_scale.dtype.element_ty, [RING, 1], FLAT)
        rings = w_ring, x_ring, x_scales, w_scales
    else:
        rings = w_ring, x_ring, None, None
    rings_of_others = None, None, None, None
    program = gl.program_id(0)
    is_others = program >= first
    columns, each, all_strips = rows, strips_each, strips
    if others is not None:
        rings_of_others = (
            reinterpret(w_ring, others.dtype, [RING, ROWS, BLOCK_K_OF_OTHERS], TILE_OF_OTHERS),
            reinterpret(x_ring, others.dtype, [HALVES * RING, HALF, BLOCK_K_OF_OTHERS], TILE_OF_OTHERS),
            None,
            None,
        )
        program = gl.where(is_others, program - first, program)
        columns = gl.where(is_others, rows_of_others, rows)
        each = gl.where(is_others, strips_each_of_others, strips_each)
        all_strips = gl.where(is_others, strips_of_others, strips)
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1 + THREADS)
        mbarrier.init(free.index(i), count=HALVES)
    fence_async_shared()
    thread_barrier()
    tile, part, alone = program // SPLITS, program % SPLITS, None
    if whole is not None:
        alone = (program >= whole) & (gl.program_id(0) < first)
        tile = gl.where(alone, program - whole + whole // SPLITS, tile)
    first_token, column = tile % token_blocks * (HALVES * HALF), tile // token_blocks
    blocks = (columns + ROWS - 1) // ROWS
    group, first_row = column // blocks, column % blocks * ROWS
    # See half_of.
    whole_row = gl.minimum(first_row, gl.maximum(columns - ROWS, 0))
    if p_x_scale is None:
        first_row = whole_row
    elif others is not None:
        # Rows of the first weight share their scales by tiles.
        first_row = gl.where(is_others, whole_row, first_row)
    begin = part * each
    if whole is not None:
        begin, each = gl.where(alone, 0, begin), gl.where(alone, strips, each)
    count = gl.minimum(each, all_strips - begin)
    # Sums are zeroed once, and no loop is jumped over.
    gl.assume(count > 0)
    row = group * columns + first_row
    # Of a launch's rows, those of the other weight follow those of the first; 16 bytes of results lie together.
    out_column = gl.multiple_of(row + gl.where(is_others, rows, 0), COLUMNS_TOGETHER)
    place = tokens, first_token, group, row, out_column, columns - first_row, begin, count
    strides = (
        x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride, x_scale_strip_stride,
        weight_scale_row_stride, weight_scale_strip_stride,
    )  # fmt: skip
    gl.warp_specialize([
        (_multiply, (p_out, p_out_scale, out_stride, is_others, alone, place, part, rings, rings_of_others, ready,
                     free, 0, SPLITS, BLOCK_K, BLOCK_K_OF_OTHERS, RING, HALVES)),
        (_multiply, (p_out, p_out_scale, out_stride, is_others, alone, place, part, rings, rings_of_others, ready,
                     free, 1, SPLITS, BLOCK_K, BLOCK_K_OF_OTHERS, RING, HALVES)),
        (_bring_all, (weights, inputs, others, inputs_of_others, p_x_scale, p_weight_scale, strides, is_others, place,
                      rings, rings_of_others, ready, free, SPLITS, BLOCK_K, BLOCK_K_OF_OTHERS, RING, HALVES, AHEAD)),
    ], [4, 4], [MULTIPLIER_REGISTERS, BRINGER_REGISTERS])  # fmt: skip
