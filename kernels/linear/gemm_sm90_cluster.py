"""The matrix product of many tokens and few tiles on Hopper, in Gluon: a cluster of programs shares each tile.

As in grouped_matmul_kernel_many_hopper.py two warpgroups multiply 64 tokens each. What brings strips is a warpgroup
too, for all threads of a program meet those of its cluster: when a tile's strips have been multiplied, each program
puts its sums in shared memory, where the strips were, and the others fetch their shares of the tokens. Parts are added
in their order, so that a product has the same bits every time.

A launch may be two products of one x: of x quantised with e4m3, and, from program `first` on, of x as it is.

How the products of many tokens and few tiles are launched on Hopper: in clusters, whose programs share a tile.

Two of one input are also launched where there are as many tiles as programs, each for one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...layout import cdiv
from ..hopper.cluster_mailbox import SIZES, clusters_at_once, launch_clusters, meet, put_pairs
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_elements, copy_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from .gemm_sm90_large import (
    HALF,
    HALF_TOKENS,
    MULTIPLIER_REGISTERS,
    ROWS,
    TILE_ROWS,
    TILE_TOKENS,
    half_of,
    sums_of,
    tiles_refused,
    tokens_of,
    word_of,
    words_of_scales,
)
from .gemm_sm90_parts import store_fetched, store_sums
from .gemm_sm90_small import (
    MOST_BYTES,
    MOST_TOKENS,
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    STRIP,
    STRIP_BYTES,
    TILE_ALIGN,
    operands_refused,
    rows_of,
    swizzled,
)

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


BRINGER_REGISTERS = 40
FEWEST_STRIPS = 8
"""Of a program."""
STRIPS_AHEAD = 3
"""Of the weight, that tiles of two halves of tokens ask for before the kernel in front has ended: the first of x come
behind them. With all six that there is room for, a layer of 128 tokens and e4m3 weights takes an H200 1.2 to 3.0 us
longer, with two or four up to 1.0. The kernel for many tokens asks for all: with three, 128 tokens of wq_b come 1.3 to
2.5 us later."""
FEW_TOKENS, FEW_TOKENS_OF_BOTH = 64, 16
"""Up to so many, a product is the kernel's for few tokens, and two of one x are. Of 64 tokens of wo_a and wo_b that one
and this take as long in a row of projections; by itself, out of the L2 cache, this takes an eighth longer."""


class Side(NamedTuple):
    """Of one weight: its rows in a group, their tiles in all groups and for all tokens, and its strips."""

    rows: int
    tiles: int
    strips: int


def side_of(tokens: int, groups: int, weight: Tensor) -> Side:
    """Of `weight` `[groups * N, K]`."""
    rows, strips = weight.shape[0] // groups, cdiv(weight.shape[1], STRIP_BYTES // weight.element_size())
    return Side(rows, cdiv(tokens, TILE_TOKENS) * groups * cdiv(rows, TILE_ROWS), strips)


def choose_cluster(gpu: Gpu, sides: list[Side]) -> int:
    """Programs of a tile: of the largest clusters that all run at once; 0 where there are none.

    Large tiles read x less often, and weights once. On an H200, with other weights in each launch, 128 tokens of
    V4-Flash's wo_a take 14.4 us and of wo_b 15.2, where the kernel for few tokens takes 15.9 and 16.9, and parts in
    memory 17.7; 64 and 128 of wq_a and wkv beside CSA's rows, with the quantisation in front, 11.7 and 14.8, where one
    launch for few tokens takes 16.9, and products apart 20.2.
    """
    tiles = sum(side.tiles for side in sides)
    return next((n for n in SIZES if tiles <= clusters_at_once(gpu, n, 1) and all(_shares(s, n) for s in sides)), 0)


def whole_fit(gpu: Gpu, first: Side, second: Side) -> bool:
    """Whether clusters of two, each with a whole tile of `first` or half of one of `second`, all run at once.

    For more tiles than can be shared, of products that otherwise could be. A strip of e4m3 has twice the columns of one
    of bfloat16, so that all programs have as many strips. On an H200, with other weights in each launch and the
    quantisation in front, 385 to 512 tokens of V4-Flash's wq_a and wkv beside HCA's rows take 20.4 us, in 56 clusters,
    where products apart take 25; of V4-Pro's 30 to 32 instead of 32 to 36, and 129 to 256 beside CSA's rows 31 instead
    of 38 to 43.
    """
    fit = cdiv(first.tiles, 2) + second.tiles <= clusters_at_once(gpu, 2, 1)
    return fit and _shares(first, 2) and _shares(second, 2)


def each_alone(gpu: Gpu, tokens: int, first: Side, second: Side) -> bool:
    """Whether programs that share nothing, each with a tile of either, all run at once, and nothing else is faster.

    On an H200, with other weights in each launch and the quantisation in front, 257 to 384 tokens of V4-Flash's wq_a
    and wkv beside CSA's rows take 26 us, products apart 30 to 32; 385 to 512 take 30, and 33 to 35; 641 to 768 beside
    HCA's rows 27.5, and 32 to 37; V4-Pro's 513 to 640 43, and 47 to 51.
    """
    return tokens > FEW_TOKENS and first.tiles + second.tiles <= gpu.sms


def _shares(side: Side, cluster: int) -> bool:
    """Whether every program of a cluster has strips, and the first of them enough."""
    each = cdiv(side.strips, cluster)
    return each >= FEWEST_STRIPS and (cluster - 1) * each < side.strips


def deepest_ring(tokens: int) -> int:
    """Buffers of strips of so many tokens that there is room for, where a program has a processor to itself."""
    slot = (TILE_ROWS + tokens) * STRIP_BYTES + 4 * tokens + 4 + 2 * 8
    return (PROCESSOR_BYTES - RESERVED_BYTES - TILE_ALIGN) // slot


def clusters_refuse(x: Tensor, weight: Tensor, weight_scale: Tensor | None, quantize: bool, gpu: Gpu) -> str:
    """Why this kernel cannot take a product that the portable one can, or should not, "" if it does."""
    tokens, groups, _ = x.shape
    if tokens <= FEW_TOKENS:
        return "it leaves few tokens to the kernel for them"
    if tokens <= MOST_TOKENS and weight.numel() * weight.element_size() <= MOST_BYTES:
        return "it leaves short weights to the kernel for few tokens"
    if choose_cluster(gpu, [side_of(tokens, groups, weight)]) == 0:
        return "it takes tiles that as many clusters run at once"
    return tiles_refused(x, weight, weight_scale, quantize)


def both_refuse(x: Tensor, weight: Tensor, weight_scale: Tensor, others: Tensor, gpu: Gpu) -> str:
    """As `clusters_refuse`, of two products of x `[T, K]`: quantised, with `weight`, and as it is, with `others`."""
    if x.shape[0] <= FEW_TOKENS_OF_BOTH:
        return "it leaves few tokens to the kernel for them"
    if 0 in (weight.shape[0], others.shape[0]):
        return "it takes two weights that have rows: the copy engine has no matrix without any"
    if others.dtype is not x.dtype or others.element_size() != 2:
        return "it multiplies the other weights with x as it is, in two bytes"
    if weight.shape[0] % TILE_ROWS or others.shape[0] % RESULTS_TOGETHER:
        return f"it takes weights of a multiple of {TILE_ROWS} rows beside others of a multiple of {RESULTS_TOGETHER}"
    if words_of_scales(weight_scale) is None:
        return "it takes scales of the weight that are float32, or bytes in words of four"
    sides = [side_of(x.shape[0], 1, weight), side_of(x.shape[0], 1, others)]
    fit = choose_cluster(gpu, sides) > 0 or whole_fit(gpu, *sides) or each_alone(gpu, x.shape[0], *sides)
    if not fit:
        return "it takes tiles that as many clusters run at once"
    # What quantises x gives it rows that are close together.
    return operands_refused(x[:, None], weight, True) or operands_refused(x[:, None], others, False)


def launch_clusters_of_tiles(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out: Tensor,
    gpu: Gpu,
    out_scale: Tensor | None = None,
    beside: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill `out` as the portable launcher does, or with e4m3, and contiguous `out_scale` `[G * N / 128, T]`.

    `beside` are x as it is and the other weight `[M, K]`, whose results follow those of `weight` in each row.
    """
    tokens, groups, _ = x.shape
    first, block_k = side_of(tokens, groups, weight), STRIP_BYTES // weight.element_size()
    second, block_k_2, of_others = Side(0, 0, 0), 0, (None, None)
    if beside is not None:
        second, block_k_2 = side_of(tokens, 1, beside[1]), STRIP_BYTES // beside[1].element_size()
        of_others = _described(beside[1], TILE_ROWS, block_k_2), _described(beside[0], HALF_TOKENS, block_k_2)
    cluster, whole = choose_cluster(gpu, [first] if beside is None else [first, second]), None
    programs = first.tiles * cluster
    if cluster == 0 and whole_fit(gpu, first, second):
        # Of an odd number of tiles, one is shared.
        cluster, whole, programs = 2, first.tiles % 2 * 2, cdiv(first.tiles, 2) * 2
    elif cluster == 0:
        cluster, programs = 1, first.tiles
    inputs, halves = rows_of(x, block_k), 1 if tokens <= HALF_TOKENS else 2
    assert inputs is not None and cluster > 0
    if weight_scale is not None:
        weight_scale = words_of_scales(weight_scale)
    kernel, programs_of_both = grouped_matmul_clusters_hopper_kernel, programs + second.tiles * cluster
    room, ring = 4 * halves * HALF_TOKENS * (TILE_ROWS + PAD), deepest_ring(halves * HALF_TOKENS)
    start = partial(launch_kernel, kernel, (programs_of_both,))
    if cluster > 1:
        start = partial(launch_clusters, kernel, programs_of_both, cluster, room)
    start(
        _described(weight, TILE_ROWS, block_k),
        _described(inputs.matrix, HALF_TOKENS, block_k),
        *of_others,
        out,
        out_scale,
        x_scale,
        weight_scale,
        out.stride(0),
        inputs.row,
        inputs.column,
        *((0, 0, 0) if x_scale is None else x_scale.stride()),
        *((0, 0) if weight_scale is None else weight_scale.stride()),
        tokens,
        cdiv(tokens, TILE_TOKENS),
        first.rows,
        second.rows,
        first.strips,
        second.strips,
        cdiv(first.strips, cluster),
        cdiv(second.strips, cluster),
        programs,
        whole,
        SPLITS=cluster,
        BLOCK_K=block_k,
        BLOCK_K_OF_OTHERS=block_k_2,
        RING=ring,
        HALVES=halves,
        AHEAD=min(STRIPS_AHEAD, ring) if halves == 2 else ring,
        TILE=swizzled(weight),
        TILE_OF_OTHERS=None if beside is None else swizzled(beside[1]),
        MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS,
        BRINGER_REGISTERS=BRINGER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )


def _described(of: Tensor, rows: int, block_k: int) -> TensorDescriptor:
    """A matrix for the copy engine, in blocks of `rows` rows."""
    return TensorDescriptor.from_tensor(of, [rows, block_k], swizzled(of))
