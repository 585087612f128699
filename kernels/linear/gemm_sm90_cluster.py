"""GEMM for many tokens and few tiles on sm_90: a cluster of CTAs splits the K of each tile.

As in gemm_sm90_large.py, two consumer warpgroups multiply 64 tokens each. The producer is a warpgroup, too, because all
threads of a CTA take part in cluster barriers. After a tile's K-blocks, each CTA stores its partial sums in shared
memory, over the ring, and the others fetch the tokens that they combine, in a fixed order: the same call gives the same
bits.

A launch may also compute two GEMMs of one x: x quantized with an e4m3 weight and, from program `first_2` on, x as it is
with a second weight. If clusters for all tiles do not run in one wave, tiles of the first weight may stay unsplit, or
every CTA may take a full tile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...layout import cdiv
from ..hopper.cluster_mailbox import (
    CLUSTER_SIZES,
    cluster_barrier,
    launch_clusters,
    max_clusters,
    store_fetched_pairs,
)
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_elements, copy_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from .gemm_sm90_epilogue import store_fetched, store_sums
from .gemm_sm90_large import (
    CONSUMER_REGISTERS,
    HALF,
    HALF_TOKENS,
    ROWS,
    TILE_ROWS,
    TILE_TOKENS,
    accumulate,
    describe,
    half_start,
    scale_element,
    scale_words,
    tokens_of,
    why_unsupported_tiles,
)
from .gemm_sm90_operands import (
    CTA_RESERVED_BYTES,
    K_BLOCK,
    K_BLOCK_BYTES,
    SM_SHARED_BYTES,
    TILE_ALIGN,
    tma_descriptor,
    tma_matrix,
    why_unsupported_operands,
)
from .gemm_sm90_small import MAX_BYTES, MAX_TOKENS

if TYPE_CHECKING:
    from .gemm import Operands

RESULT_ALIGN = 8
"""Rows of either weight are a multiple of this, so that 16 bytes of results lie together."""
PAD = 8
"""Words after each token of partial sums: the pairs of half a warp then go to different banks."""

COLUMN_ALIGN = gl.constexpr(RESULT_ALIGN)
WARPS = gl.constexpr(4)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of the producer warpgroup
THREADS = gl.constexpr(128)
PITCH = gl.constexpr(TILE_ROWS + PAD)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_ROWS, 16]))


@gluon.jit
def _load(descriptors, scales, strides, place, rings, barriers, AHEAD: gl.constexpr):
    """Load the K-blocks of a CTA's split of a tile; AHEAD of them of the weight before waiting for other kernels."""
    weights, inputs = descriptors
    p_x_scale, p_weight_scale = scales
    w_ring, x_ring, x_scales, w_scales = rings
    x_group_row, x_group_column, x_token, x_group, x_k, w_row, w_k = strides
    tokens, first_token, group, row, _, _, begin, count = place
    ready, free = barriers
    RING: gl.constexpr = w_ring.shape[0]
    HALVES: gl.constexpr = x_ring.shape[0] // RING
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BYTES: gl.constexpr = (ROWS + HALVES * HALF) * K_BLOCK
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
        k_block = begin + i
        if i >= ahead:
            if i >= RING:
                mbarrier.wait(free.index(slot), ((i // RING) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BYTES)
            copy_tile(weights, [row, k_block * BLOCK_K], ready.index(slot), w_ring.index(slot))
        for half in gl.static_range(HALVES):
            at = [x_row + half_start(half, first_token, tokens), x_column + k_block * BLOCK_K]
            copy_tile(inputs, at, ready.index(slot), x_ring.index(HALVES * slot + half))
        if p_x_scale is not None:
            x_word, w_word = scale_element(p_scales, k_block), scale_element(p_scale, k_block)
            copy_elements(x_scales.index(slot), p_scales + x_word * x_k)
            copy_elements(w_scales.index(slot), p_scale + w_word * w_k)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def _accumulate(rings, barriers, half: gl.constexpr, begin, count):
    """Multiply a CTA's K-blocks. Both GEMMs have their sums in the same layout."""
    ready, free = barriers
    RING: gl.constexpr = rings[0].shape[0]
    acc, _ = accumulate(rings, (ready, free, None), half, 0, begin, count, RING)
    return gl.convert_layout(acc, SUMS)


@gluon.jit
def _store_to_fetch(acc, half: gl.constexpr):
    """Store partial sums where the other CTAs of the cluster fetch them."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, ACC)), 1) + half * HALF
    o_n = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, ACC)), 0)
    store_fetched_pairs(acc, 4 * (o_m * PITCH + o_n))


@gluon.jit
def _store_half(acc, out, place, half: gl.constexpr):
    """Store the complete sums of one half of the tokens."""
    tokens, first_token, _, _, out_column, columns, _, _ = place
    token = half_start(half, first_token, tokens) + gl.arange(0, HALF, gl.SliceLayout(1, acc.type.layout))
    store_sums(acc, token, token < tokens, out, tokens, out_column, columns, 1)


@gluon.jit
def _combine(out, place, number, unsplit, half: gl.constexpr, SPLITS: gl.constexpr):
    """Combine and store piece `number` of SPLITS of one half of the tokens. For `unsplit` see `store_fetched`."""
    COMBINE: gl.constexpr = (HALF + 2 * SPLITS - 1) // (2 * SPLITS) * 2
    tokens, first_token, _, _, out_column, columns, _, _ = place
    first, half_token = number * COMBINE, half_start(half, first_token, tokens)
    count = gl.minimum(gl.minimum(COMBINE, HALF - first), tokens - half_token - first)
    span = tokens, half_token - half * HALF, count, out_column, columns
    store_fetched(out, span, half * HALF + first, SPLITS, COMBINE, ROWS, PITCH, WARPS, unsplit)


@gluon.jit
def _consume_half(
    out, is_second, alone, place, part, rings, barriers, half: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Compute one half of the tokens, and combine and store this CTA's piece of it."""
    rings_1, rings_2 = rings
    begin, count = place[6], place[7]
    RING: gl.constexpr = rings[0][0].shape[0]
    if rings_2[0] is None:
        acc = _accumulate(rings_1, barriers, half, begin, count)
    else:
        if is_second:
            acc = _accumulate(rings_2, barriers, half, begin, count)
        else:
            acc = _accumulate(rings_1, barriers, half, begin, count)
    if SPLITS == 1:
        _store_half(acc, out, place, half)
    else:
        # The other half must have read the ring before sums overwrite it.
        free, last = barriers[1], count - 1
        mbarrier.wait(free.index(last % RING), (last // RING) & 1)
        _store_to_fetch(acc, half)
        cluster_barrier(True)
        if alone is None:
            _combine(out, place, part, None, half, SPLITS)
        else:
            # A loop, because code comes from memory: a CTA with an unsplit tile stores all pieces.
            for number in range(gl.where(alone, 0, part), gl.where(alone, SPLITS, part + 1)):
                _combine(out, place, number, (alone, part), half, SPLITS)
        # No CTA ends before the others have fetched its partial sums.
        thread_barrier()
        cluster_barrier(False)


@gluon.jit
def _consume(
    out, is_second, alone, place, part, rings, barriers, half: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Run a consumer warpgroup, which is idle if a single half holds all tokens."""
    HALVES: gl.constexpr = rings[0][1].shape[0] // rings[0][0].shape[0]
    if half < HALVES:
        _consume_half(out, is_second, alone, place, part, rings, barriers, half, SPLITS)
    else:
        _join_barriers(SPLITS)


@gluon.jit
def _join_barriers(SPLITS: gl.constexpr):
    """Take part in the cluster barriers of the consumers: they wait for all threads."""
    if SPLITS > 1:
        cluster_barrier(True)
        cluster_barrier(False)


@gluon.jit
def _produce(
    descriptors, scales, strides, is_second, place, rings, barriers, SPLITS: gl.constexpr, AHEAD: gl.constexpr
):  # fmt: skip
    """Load the K-blocks of a CTA's split of a tile of either GEMM."""
    first, second = descriptors
    rings_1, rings_2 = rings
    if second[0] is None:
        _load(first, scales, strides, place, rings_1, barriers, AHEAD)
    else:
        if is_second:
            _load(second, (None, None), strides, place, rings_2, barriers, AHEAD)
        else:
            _load(first, scales, strides, place, rings_1, barriers, AHEAD)
    _join_barriers(SPLITS)


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_k_stride", "tokens",
        "token_blocks", "first_2", "first_unsplit",
    ]
)  # fmt: skip
def gemm_sm90_cluster_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [128, BLOCK_K]
    inputs,  # descriptor of rows of x in blocks of [64, BLOCK_K]
    weights_2,  # descriptor of the second weight [M, K] in blocks of [128, BLOCK_K_2], or None
    inputs_2,  # descriptor of rows of x as it is in blocks of [64, BLOCK_K_2], or None
    p_out,  # [T, G * N + M], rows contiguous
    p_out_scale,  # of e4m3 results, float32 [G * N / 128, T], contiguous; or None
    p_x_scale,  # [T, G, K-blocks] float32, [T, G, words] int32, or None
    p_weight_scale,  # [row blocks, K-blocks] float32, [row blocks, words] int32, or None
    out_stride,  # of a token
    x_group_row,  # start of a group in `inputs`, in units of the group
    x_group_column,
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_k_stride,
    weight_scale_row_stride,
    weight_scale_k_stride,
    tokens,
    token_blocks,  # tiles of tokens
    rows,  # N, a multiple of 128 if there are several groups
    rows_2,  # M
    k_blocks,  # of K
    k_blocks_2,
    k_blocks_each,  # of a CTA
    k_blocks_each_2,
    first_2,  # first program of the second GEMM
    first_unsplit,  # first program whose tile is unsplit, 0 or SPLITS; None if all are split
    SPLITS: gl.constexpr,  # CTAs of a cluster; 1 if each has a full tile
    RING: gl.constexpr,
    HALVES: gl.constexpr,  # of a tile's tokens, 1 if a half holds all
    AHEAD: gl.constexpr,  # K-blocks of the weight that are loaded before the previous kernel has ended
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute tile p // SPLITS in the programs p of a cluster, `k_blocks_each` K-blocks each, the last the rest.

    From `first_unsplit` on a program computes a whole tile of the first weight. A cluster before them shares tile 0; if
    the number of tiles is odd, no other tile has its tokens (see `half_start`).
    """
    w_ring = gl.allocate_shared_memory(weights.dtype, [RING, ROWS, weights.block_shape[1]], weights.layout)
    x_ring = gl.allocate_shared_memory(inputs.dtype, [HALVES * RING, HALF, weights.block_shape[1]], weights.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    if p_x_scale is not None:
        x_scales = gl.allocate_shared_memory(p_x_scale.dtype.element_ty, [RING, HALVES * HALF], FLAT)
        w_scales = gl.allocate_shared_memory(p_weight_scale.dtype.element_ty, [RING, 1], FLAT)
        rings = w_ring, x_ring, x_scales, w_scales
    else:
        rings = w_ring, x_ring, None, None
    rings_2 = None, None, None, None
    program = gl.program_id(0)
    is_second = program >= first_2
    columns, each, all_k_blocks = rows, k_blocks_each, k_blocks
    if weights_2 is not None:
        rings_2 = (
            reinterpret(w_ring, weights_2.dtype, [RING, ROWS, weights_2.block_shape[1]], weights_2.layout),
            reinterpret(x_ring, weights_2.dtype, [HALVES * RING, HALF, weights_2.block_shape[1]], weights_2.layout),
            None,
            None,
        )
        program = gl.where(is_second, program - first_2, program)
        columns = gl.where(is_second, rows_2, rows)
        each = gl.where(is_second, k_blocks_each_2, k_blocks_each)
        all_k_blocks = gl.where(is_second, k_blocks_2, k_blocks)
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1 + THREADS)
        mbarrier.init(free.index(i), count=HALVES)
    fence_async_shared()
    thread_barrier()
    tile, part, alone = program // SPLITS, program % SPLITS, None
    if first_unsplit is not None:
        alone = (program >= first_unsplit) & (gl.program_id(0) < first_2)
        tile = gl.where(alone, program - first_unsplit + first_unsplit // SPLITS, tile)
    first_token, column = tile % token_blocks * (HALVES * HALF), tile // token_blocks
    blocks = (columns + ROWS - 1) // ROWS
    group, first_row = column // blocks, column % blocks * ROWS
    # The last tile starts earlier rather than reaching past the end, like halves in `half_start`.
    whole_row = gl.minimum(first_row, gl.maximum(columns - ROWS, 0))
    if p_x_scale is None:
        first_row = whole_row
    elif weights_2 is not None:
        # Not for the first weight: the rows of a tile share their scales.
        first_row = gl.where(is_second, whole_row, first_row)
    begin = part * each
    if first_unsplit is not None:
        begin, each = gl.where(alone, 0, begin), gl.where(alone, k_blocks, each)
    count = gl.minimum(each, all_k_blocks - begin)
    # Sums are zeroed once, and no loop is jumped over.
    gl.assume(count > 0)
    row = group * columns + first_row
    # The results of the second weight follow those of the first.
    out_column = gl.multiple_of(row + gl.where(is_second, rows, 0), COLUMN_ALIGN)
    place = tokens, first_token, group, row, out_column, columns - first_row, begin, count
    strides = (
        x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride, x_scale_k_stride,
        weight_scale_row_stride, weight_scale_k_stride,
    )  # fmt: skip
    out = p_out, p_out_scale, out_stride
    gl.warp_specialize([
        (_consume, (out, is_second, alone, place, part, (rings, rings_2), (ready, free), 0, SPLITS)),
        (_consume, (out, is_second, alone, place, part, (rings, rings_2), (ready, free), 1, SPLITS)),
        (_produce, (((weights, inputs), (weights_2, inputs_2)), (p_x_scale, p_weight_scale), strides, is_second, place,
                    (rings, rings_2), (ready, free), SPLITS, AHEAD)),
    ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


PRODUCER_REGISTERS = 40
MIN_K_BLOCKS = 8
"""Fewest K-blocks of a CTA that shares its tile."""
K_BLOCKS_AHEAD = 3
"""K-blocks of the weight that CTAs with two halves of tokens load before the previous kernel has ended. With more, the
first K-blocks of x would wait in the queue for them."""
FEW_TOKENS, FEW_TOKENS_OF_PAIR = 64, 16
"""Up to so many tokens, a GEMM is left to the kernel for few tokens, and two of one x to that for pairs."""


class WeightTiles(NamedTuple):
    """Size of a weight: rows per group, tiles of all groups and tokens, and K-blocks."""

    rows: int
    tiles: int
    k_blocks: int


def weight_tiles(tokens: int, groups: int, weight: Tensor) -> WeightTiles:
    """Return the size of `weight` `[groups * N, K]` for so many tokens."""
    rows, k_blocks = weight.shape[0] // groups, cdiv(weight.shape[1], K_BLOCK_BYTES // weight.element_size())
    return WeightTiles(rows, cdiv(tokens, TILE_TOKENS) * groups * cdiv(rows, TILE_ROWS), k_blocks)


def choose_cluster(gpu: Gpu, weights: list[WeightTiles]) -> int:
    """Return the size of the largest clusters that run in one wave, 0 if there are none."""
    tiles = sum(weight.tiles for weight in weights)
    return next(
        (n for n in CLUSTER_SIZES if tiles <= max_clusters(gpu, n, 1) and all(_can_split(w, n) for w in weights)), 0
    )


def unsplit_fit(gpu: Gpu, first: WeightTiles, second: WeightTiles) -> bool:
    """Return whether clusters of two run in one wave whose CTAs take a tile of `first`, or half of one of `second`.

    A K-block of e4m3 has twice the columns of one of bfloat16, so that all CTAs have as many K-blocks.
    """
    fit = cdiv(first.tiles, 2) + second.tiles <= max_clusters(gpu, 2, 1)
    return fit and _can_split(first, 2) and _can_split(second, 2)


def single_fit(gpu: Gpu, tokens: int, first: WeightTiles, second: WeightTiles) -> bool:
    """Return whether CTAs with one full tile each run in one wave, and no other kernel is faster."""
    return tokens > FEW_TOKENS and first.tiles + second.tiles <= gpu.sms


def _can_split(weight: WeightTiles, cluster: int) -> bool:
    """Return whether every CTA of a cluster has K-blocks, and all but the last MIN_K_BLOCKS."""
    k_blocks_per_cta = cdiv(weight.k_blocks, cluster)
    return k_blocks_per_cta >= MIN_K_BLOCKS and (cluster - 1) * k_blocks_per_cta < weight.k_blocks


def ring_depth(tokens: int) -> int:
    """Return the ring buffers that fit for a tile of `tokens` in a CTA that has its SM alone."""
    slot = (TILE_ROWS + tokens) * K_BLOCK_BYTES + 4 * tokens + 4 + 2 * 8
    return (SM_SHARED_BYTES - CTA_RESERVED_BYTES - TILE_ALIGN) // slot


def why_unsupported(operands: Operands, quantize: bool, gpu: Gpu) -> str:
    """Return why this kernel cannot or should not take the operands, "" if it should."""
    weight, (tokens, groups, _) = operands.weight, operands.x.shape
    if tokens <= FEW_TOKENS:
        return f"up to {FEW_TOKENS} tokens are few tokens, these are {tokens}"
    if tokens <= MAX_TOKENS and weight.nbytes <= MAX_BYTES:
        return (
            f"for {tokens} tokens, short weights of up to {MAX_BYTES} bytes are faster with the kernel for few tokens"
        )
    size = weight_tiles(tokens, groups, weight)
    if choose_cluster(gpu, [size]) == 0:
        return _too_many(gpu, size.tiles)
    return why_unsupported_tiles(operands, quantize)


def _too_many(gpu: Gpu, tiles: int) -> str:
    return f"clusters for {tiles} tiles, with {MIN_K_BLOCKS} K-blocks per CTA, do not run at once on {gpu.sms} SMs"


def why_unsupported_pair(x: Tensor, weight: Tensor, weight_scale: Tensor, weight_2: Tensor, gpu: Gpu) -> str:
    """Return why this kernel cannot or should not take quantized x `[T, K]` and `weight` with x and `weight_2`."""
    if x.shape[0] <= FEW_TOKENS_OF_PAIR:
        return f"up to {FEW_TOKENS_OF_PAIR} tokens are few tokens, these are {x.shape[0]}"
    if 0 in (weight.shape[0], weight_2.shape[0]):
        return f"both weights must have rows, they have {weight.shape[0]} and {weight_2.shape[0]}"
    if weight_2.dtype is not x.dtype or weight_2.element_size() != 2:
        return f"x and the second weight must have one dtype of two bytes, not {x.dtype} and {weight_2.dtype}"
    for of, multiple in ((weight, TILE_ROWS), (weight_2, RESULT_ALIGN)):
        if of.shape[0] % multiple:
            return f"a weight in {of.dtype} must have a multiple of {multiple} rows, not {of.shape[0]}"
    if scale_words(weight_scale) is None:
        return f"scales of the weight must be float32, or bytes in words of four; they are {describe(weight_scale)}"
    sizes = [weight_tiles(x.shape[0], 1, weight), weight_tiles(x.shape[0], 1, weight_2)]
    fit = choose_cluster(gpu, sizes) > 0 or unsplit_fit(gpu, *sizes) or single_fit(gpu, x.shape[0], *sizes)
    if not fit:
        return _too_many(gpu, sum(size.tiles for size in sizes))
    # The launch that quantizes x makes its rows contiguous.
    return why_unsupported_operands(x[:, None], weight, True) or why_unsupported_operands(x[:, None], weight_2, False)


def launch(
    operands: Operands, out: Tensor, gpu: Gpu, out_scale: Tensor | None = None,
    second: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill `out` `[T, G * N + M]` like `gemm.grouped_gemm`.

    Args:
        out_scale: contiguous `[G * N / 128, T]`, with which results are quantized to e4m3.
        second: x as it is and the second weight `[M, K]`; its results follow those of `weight` in each row.
    """
    x, x_scale, weight, weight_scale = operands
    tokens, groups, _ = x.shape
    size, block_k = weight_tiles(tokens, groups, weight), K_BLOCK_BYTES // weight.element_size()
    size_2, descriptors_2 = WeightTiles(0, 0, 0), (None, None)
    if second is not None:
        size_2, block_k_2 = weight_tiles(tokens, 1, second[1]), K_BLOCK_BYTES // second[1].element_size()
        descriptors_2 = tuple(tma_descriptor(second[i], n, block_k_2) for i, n in ((1, TILE_ROWS), (0, HALF_TOKENS)))
    cluster, first_unsplit = choose_cluster(gpu, [size] if second is None else [size, size_2]), None
    programs = size.tiles * cluster
    if cluster == 0 and unsplit_fit(gpu, size, size_2):
        # If the number of tiles is odd, one is split.
        cluster, first_unsplit, programs = 2, size.tiles % 2 * 2, cdiv(size.tiles, 2) * 2
    elif cluster == 0:
        cluster, programs = 1, size.tiles
    inputs, halves = tma_matrix(x, block_k), 1 if tokens <= HALF_TOKENS else 2
    assert inputs is not None and cluster > 0
    if weight_scale is not None:
        weight_scale = scale_words(weight_scale)
    kernel, ctas, ring = gemm_sm90_cluster_kernel, programs + size_2.tiles * cluster, ring_depth(halves * HALF_TOKENS)
    start = partial(launch_kernel, kernel, (ctas,))
    if cluster > 1:
        start = partial(launch_clusters, kernel, ctas, cluster, 4 * halves * HALF_TOKENS * (TILE_ROWS + PAD))
    start(
        tma_descriptor(weight, TILE_ROWS, block_k),
        tma_descriptor(inputs.matrix, HALF_TOKENS, block_k),
        *descriptors_2,
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
        size.rows,
        size_2.rows,
        size.k_blocks,
        size_2.k_blocks,
        cdiv(size.k_blocks, cluster),
        cdiv(size_2.k_blocks, cluster),
        programs,
        first_unsplit,
        SPLITS=cluster,
        RING=ring,
        HALVES=halves,
        AHEAD=min(K_BLOCKS_AHEAD, ring) if halves == 2 else ring,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
