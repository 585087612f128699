"""GEMM for few tokens on sm_90: bound by reading the weight.

A CTA computes a tile of `block_n` rows of the weight for `block_m` tokens. TMA copies load K-blocks of the weight and
of x into a ring of buffers, as many at once as shared memory holds, and the tensor core reads them there. If x is to be
quantized, the warps load and quantize all that their CTA needs of it while the weight arrives. In the loop nothing but
the arrival of a K-block is waited for: while copies saturate memory, a load of a few bytes takes as long as a K-block.

The splits of a tile's K are combined within a cluster, or in global memory by the last CTA to arrive. No kernel of the
same step writes the weight, so its copies start before the previous kernel has ended (PDL).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ...layout import cdiv
from ..hopper.cluster_mailbox import CLUSTER_SIZES, allocate_mailbox, launch_clusters, max_clusters
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_epilogue import (
    combine_fetched_bytes,
    combine_in_cluster,
    combine_in_memory,
    combine_mailbox_bytes,
    open_combine_mailbox,
    store_tile,
    tokens_per_combiner,
)
from .gemm_sm90_operands import (
    CTA_RESERVED_BYTES,
    K_BLOCK,
    K_BLOCK_BYTES,
    SM_SHARED_BYTES,
    TILE_ALIGN,
    Config,
    add_scaled,
    load_paced,
    load_weight_scales,
    load_x_scales,
    power_of_two,
    quantize_x,
    store_rows,
    tma_descriptor,
    tma_matrix,
    wait_paced,
    why_unsupported_operands,
)

if TYPE_CHECKING:
    from .gemm import Operands


@gluon.jit
def _locate(program, shape, config: gl.constexpr):
    """Return tile, number of tiles, split, first token, group, block of rows, first K-block and their number."""
    tokens, token_blocks, groups, rows, size, k_blocks_each = shape
    SPLITS: gl.constexpr = config.splits
    blocks = (rows + config.block_n - 1) // config.block_n
    tiles = groups * blocks * token_blocks
    # The first copy waits for divisions by numbers that are not compile-time constants.
    if config.cluster or SPLITS == 1:
        tile, part = program // SPLITS, program % SPLITS
    else:
        tile, part = program % tiles, program // tiles
    # Neighbours share a tile of the weight.
    first_token, column = tile % token_blocks * config.block_m, tile // token_blocks
    # TMA copies fill rows past the end at a fifth of their rate; the last tokens are rather computed twice.
    first_token = gl.minimum(first_token, gl.maximum(tokens - config.block_m, 0))
    if groups == 1:
        group, block = gl.to_tensor(0), column
    else:
        group, block = column // blocks, column % blocks
    begin = part * k_blocks_each
    count = gl.minimum(k_blocks_each, (size + config.block_k - 1) // config.block_k - begin)
    # Sums are zeroed once, and no loop is jumped over.
    gl.assume(count > 0)
    return tile, tiles, part, first_token, group, block, begin, count


@gluon.jit
def _start_weight(
    weights, w_ring, ready, first_row, begin, filled, X_BYTES: gl.constexpr, BARRIERS: gl.constexpr,
    PACE: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first K-blocks of the weight; `ready` also expects X_BYTES of x. Return pace barriers."""
    RING: gl.constexpr = w_ring.shape[0]
    W_BYTES: gl.constexpr = w_ring.shape[1] * K_BLOCK
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    for i in gl.static_range(BARRIERS):
        mbarrier.init(ready.index(i), count=RING // BARRIERS)
    fence_async_shared()
    thread_barrier()
    pace = None
    if PACE > 0:
        pace = load_paced(weights, w_ring, first_row, begin, filled, PACE)
    for i in range(filled):
        mbarrier.expect(ready.index(i % BARRIERS), X_BYTES if PACE > 0 else W_BYTES + X_BYTES)
        if PACE == 0:
            copy_tile(weights, [first_row, (begin + i) * BLOCK_K], ready.index(i % BARRIERS), w_ring.index(i))
    if BARRIERS < RING:
        for _ in range(filled, RING):
            mbarrier.arrive(ready.index(0))
    return pace


@gluon.jit
def _accumulate(
    descriptors, rings, scales, ready, corner, begin, count, config: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Multiply a CTA's K-blocks and return float32 `[block_n, block_m]`, refilling a ring that does not hold them all.

    The descriptor of x is None if x is in shared memory as a whole, `scales` is None for floating operands.
    """
    weights, inputs = descriptors
    w_ring, x_ring = rings
    first_row, x_row, x_column = corner
    BLOCK_M: gl.constexpr = config.block_m
    BLOCK_N: gl.constexpr = config.block_n
    MMAS: gl.constexpr = config.mmas
    RING: gl.constexpr = config.ring
    RESIDENT: gl.constexpr = config.resident
    ONE_BARRIER: gl.constexpr = RESIDENT and scales is not None and RING > 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, config.block_k // 4]
    )
    BYTES: gl.constexpr = (BLOCK_N if inputs is None else BLOCK_N + BLOCK_M) * K_BLOCK
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    sums = warpgroup_mma_init(acc) if RESIDENT else acc
    for first in range(0, count, MMAS):
        if not RESIDENT:
            # All threads have waited for the last MMA: the buffer that it read is free.
            thread_barrier()
            following = first - 1 + RING
            if (first > 0) & (following < count):
                free = following % RING
                o_k = (begin + following) * config.block_k
                mbarrier.expect(ready.index(free), BYTES)
                copy_tile(weights, [first_row, o_k], ready.index(free), w_ring.index(free))
                if inputs is not None:
                    copy_tile(inputs, [x_row, x_column + o_k], ready.index(free), x_ring.index(free))
        if not ONE_BARRIER:
            mbarrier.wait(ready.index(first % RING), (first // RING) & 1)
        products = ()
        for ahead in gl.static_range(MMAS):
            # Past the last K-block the last one is multiplied again.
            k_block = gl.minimum(first + ahead, count - 1)
            w = w_ring.index(k_block % RING)
            x = x_ring.index(k_block if inputs is None else k_block % RING)
            if scales is None:
                sums = warpgroup_mma(w, x.permute((1, 0)), sums, is_async=True)
                if not RESIDENT:
                    sums = warpgroup_mma_wait(0, deps=[sums])
            else:
                product = warpgroup_mma(w, x.permute((1, 0)), zero, use_acc=False, is_async=True)
                products += (product,)  # type: ignore[assignment]
        if scales is not None:
            acc = add_scaled(acc, products, scales[0], scales[1], first, count, MMAS)
    if scales is None:
        acc = warpgroup_mma_wait(0, deps=[sums])
    return acc


@gluon.jit
def compute_tile(
    program, mailbox, operands, scales, out, partials, shape, config: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Compute split and tile number `program` of a GEMM, and store or combine it.

    `operands` are the descriptors of the weight and of x, pointer and row stride of an x to quantize, and row and
    column of a group in x; `scales` are pointer and strides for x and for the weight. For the other tuples see the
    kernel.
    """
    weights, inputs, p_x, x_stride, x_group_row, x_group_column = operands
    x_scale, weight_scale = scales
    p_x_scale, x_token_stride, x_group_stride, x_k_stride = x_scale
    tokens, _, _, rows, size, _ = shape
    BLOCK_M: gl.constexpr = config.block_m
    BLOCK_K: gl.constexpr = config.block_k
    RING: gl.constexpr = config.ring
    QUANTIZE: gl.constexpr = inputs is None
    TILE: gl.constexpr = weights.layout
    tile, tiles, part, first_token, group, block, begin, count = _locate(program, shape, config)
    first_row = group * rows + block * config.block_n
    x_row, x_column = group * x_group_row + first_token, group * x_group_column

    w_ring = gl.allocate_shared_memory(weights.dtype, [RING, config.block_n, BLOCK_K], TILE)
    if QUANTIZE:
        values = gl.allocate_shared_memory(weights.dtype, [config.chunks, config.chunk * BLOCK_M, BLOCK_K], TILE)
    else:
        x_ring = gl.allocate_shared_memory(inputs.dtype, [RING, BLOCK_M, BLOCK_K], TILE)
    # K-blocks that are scaled and all resident share one barrier: a wait for one that has arrived takes as long as its
    # MMA. Others are multiplied as they arrive.
    BARRIERS: gl.constexpr = 1 if config.resident and weight_scale[0] is not None else RING
    ready = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    # Not a constant, so that loops stay loops: short code leaves a cold instruction cache sooner.
    filled = gl.minimum(count, RING)
    X_BYTES: gl.constexpr = 0 if QUANTIZE else BLOCK_M * K_BLOCK
    pace = _start_weight(weights, w_ring, ready, first_row, begin, filled, X_BYTES, BARRIERS, config.pace)
    gdc_launch_dependents()
    if config.mailbox_bytes > 0:
        open_combine_mailbox(
            mailbox, part, tokens, first_token, config.splits, config.combine_tokens, BLOCK_M, config.block_n
        )
    gdc_wait()
    if not QUANTIZE:
        for i in range(filled):
            copy_tile(inputs, [x_row, x_column + (begin + i) * BLOCK_K], ready.index(i % BARRIERS), x_ring.index(i))

    shared_scales = None
    if weight_scale[0] is not None:
        # Loaded before anything is waited for, and stored once something else has been waited for.
        w_scale = load_weight_scales(weight_scale, group * rows, block, rows, begin, count, config, WARPS)
        if QUANTIZE:
            new_scales = gl.allocate_shared_memory(gl.float32, [config.chunks, config.chunk * BLOCK_M], FLAT)
            p_x += group.to(gl.int64) * x_group_row * x_stride + group * x_group_column
            quantize_x(
                p_x, x_stride, (tokens, first_token), (begin, count, size), values, new_scales, config, WARPS
            )  # fmt: skip
            x_scales = reinterpret(new_scales, gl.float32, [config.chunks * config.chunk, BLOCK_M], FLAT)
            x_ring = reinterpret(values, weights.dtype, [config.chunks * config.chunk, BLOCK_M, BLOCK_K], TILE)
        else:
            p_x_scale += group.to(gl.int64) * x_group_stride
            known = load_x_scales(
                p_x_scale, x_token_stride, x_k_stride, tokens, first_token, begin, count, config, WARPS
            )  # fmt: skip
            x_scales = store_rows(known)
        shared_scales = x_scales, store_rows(w_scale)
    if QUANTIZE:
        thread_barrier()
    if config.pace > 0:
        wait_paced(pace, filled, config.pace)
    if BARRIERS < RING:
        mbarrier.wait(ready.index(0), 0)
    corner = first_row, x_row, x_column
    acc = _accumulate(
        (weights, inputs), (w_ring, x_ring), shared_scales, ready, corner, begin, count, config, WARPS
    )  # fmt: skip

    place = tokens, first_token, group, block, rows
    if config.cluster:
        combine_in_cluster(
            acc, part, mailbox, out, place, config.splits, config.combine_tokens, config.mailbox_bytes > 0, WARPS
        )
    elif config.splits > 1:
        combine_in_memory(acc, part, tile, tiles, out, partials, place, config.splits, WARPS)
    else:
        store_tile(acc, out, place, WARPS)


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_k_stride", "tokens",
    ]
)  # fmt: skip
def gemm_sm90_small_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [block_n, block_k]
    inputs,  # descriptor of rows of x in blocks of [block_m, block_k], or None if x is quantized here
    p_x,  # rows of x to quantize, or None
    x_stride,  # of a row
    p_out,  # [T, G * N], rows contiguous
    p_out_scale,  # of e4m3 results, float32 [G * N / 128, T], contiguous; or None
    p_partial,  # [splits, tiles, block_n * block_m] float32, contiguous; None for clusters and without splits
    p_arrived,  # [>= tiles] int32, zero before and after, or None
    p_x_scale,  # [T, G, K-blocks] float32, [T, G, words] int32, or None
    p_weight_scale,  # [row blocks, K-blocks] float32 or uint8, or None
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
    groups,
    rows,  # N
    size,  # K
    k_blocks_each,  # of a CTA
    config: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute a tile per CTA, or a split of it.

    Program p takes tile p % tiles and its K-blocks from p // tiles * k_blocks_each on; in clusters, whose CTAs share a
    tile, tile p // splits.
    """
    mailbox = allocate_mailbox(config.mailbox_bytes)
    compute_tile(
        gl.program_id(0), mailbox, (weights, inputs, p_x, x_stride, x_group_row, x_group_column),
        (
            (p_x_scale, x_scale_token_stride, x_scale_group_stride, x_scale_k_stride),
            (p_weight_scale, weight_scale_row_stride, weight_scale_k_stride),
        ),
        (p_out, p_out_scale, out_stride), (p_partial, p_arrived),
        (tokens, token_blocks, groups, rows, size, k_blocks_each), config, num_warps,
    )  # fmt: skip


MAX_TOKENS, MAX_TILE_TOKENS, MAX_BYTES = 128, 64, 16 << 20
"""Most tokens of a call, most of a tile, and the largest weight that two tiles of tokens may each read."""
MAX_QUANTIZED_ROWS = 128
"""K-blocks of tokens that a CTA quantizes together: as many as its registers hold in float32; bfloat16 would allow
twice as many."""
MAX_MMAS, MAX_MMA_SUMS = 4, 1 << 14
"""Most MMAs issued before the first is scaled, and most sums they may have together. Only CTAs that are alone on their
SM, with all of their K-blocks in the ring, issue more than one."""
PACED_BYTES = 64 << 10
"""Bytes of a paced weight in flight per SM: they saturate memory without delaying loads of the previous kernels."""
BUFFER_BARRIER_BYTES = 2 * 8
"""Barriers of a ring buffer: one for both operands, one for a paced weight."""


class SmallTiling(NamedTuple):
    """Tiling of a launch: rows of a tile, warps, CTAs per SM that must fit, CTAs per tile, and whether they cluster.

    `choose_tiling` splits a tile in clusters only; `dsv4 bench gemm_tiles` compares them with splits through memory.
    """

    block_n: int
    warps: int
    ctas_per_sm: int
    splits: int
    cluster: bool = False


def block_of(tokens: int) -> int:
    """Return the number of tokens in a tile."""
    return min(max(8, power_of_two(tokens)), MAX_TILE_TOKENS)


def choose_tiling(
    gpu: Gpu, tokens: int, groups: int, rows: int, k_blocks: int, two_bytes: bool, whole: bool = False,
    quantize: bool = False,
) -> SmallTiling:  # fmt: skip
    """Return the tiling for `[tokens, groups * rows]` results of `k_blocks` K-blocks.

    Few e4m3 tokens take large tiles: the work per K-block of x does not depend on the tile. More tokens, and elements
    of two bytes, take small tiles, which are spread evenly over all SMs. A tile is split in as large a cluster as
    runs in one wave, with eight K-blocks per CTA at least from 32 tokens on. Three CTAs share an SM if two would leave
    tiles for a second wave, or if small tiles of a quantized x have more than 16 K-blocks per CTA.

    Args:
        two_bytes: the weight has elements of two bytes, not e4m3.
        whole: tiles of 128 rows are needed, because results are quantized per 128.
        quantize: x is quantized in the kernel.
    """
    block_m = block_of(tokens)
    many = block_m > 16
    wide, slim = (cdiv(tokens, block_m) * groups * cdiv(rows, block_n) for block_n in (128, 64))
    fewest = 8 if many else 2
    block_n, tiles = 128, wide
    if (many or two_bytes) and slim <= 2 * gpu.sms and not whole:
        splits = _most_splits(gpu, slim, k_blocks // fewest, 2)
        if two_bytes or splits == 1 or cdiv(k_blocks, splits) <= 2 * fewest:
            block_n, tiles = 64, slim
        elif not quantize and tokens <= MAX_TILE_TOKENS:
            return SmallTiling(64, 4, 3, _most_splits(gpu, slim, k_blocks // fewest, 3), True)
    if two_bytes and block_m == MAX_TILE_TOKENS and 10 * tiles > 9 * gpu.sms:
        # Combining so many tokens costs more than the SMs that are left idle.
        return SmallTiling(block_n, 4, 1 if tiles <= gpu.sms else _ctas_per_sm(gpu, block_n, tiles), 1)
    ctas_per_sm = _ctas_per_sm(gpu, block_n, tiles)
    splits = _most_splits(gpu, tiles, k_blocks // fewest, ctas_per_sm)
    alone = max_clusters(gpu, splits, 1) if splits > 1 else gpu.sms * (not two_bytes)
    if many and tiles <= alone:
        ctas_per_sm = 1
    return SmallTiling(block_n, 4, ctas_per_sm, splits, splits > 1)


def _ctas_per_sm(gpu: Gpu, block_n: int, tiles: int) -> int:
    """Return 3 if that many CTAs per SM run all tiles in one wave and two do not, else 2."""
    return 3 if block_n == 128 and 2 * gpu.sms < tiles <= 3 * gpu.sms else 2


def _most_splits(gpu: Gpu, tiles: int, most: int, ctas_per_sm: int) -> int:
    """Return the largest cluster size, at most `most`, such that `tiles` clusters run at once; 1 if there is none."""
    sizes = (size for size in CLUSTER_SIZES if size <= most and tiles <= max_clusters(gpu, size, ctas_per_sm))
    return next(sizes, 1)


def tiling_of(
    x: Tensor, weight: Tensor, gpu: Gpu, quantize: bool, whole: bool = False, pinned: bool = False
) -> tuple[SmallTiling, int]:
    """Return the tiling of a GEMM, without CTAs that have no K-block, and the K-blocks per CTA.

    With `pinned` it is that of one token, so that how K is split, and with it all sums, follows from the weight alone:
    the splits of a tile are added in their order, and an MMA adds up K in the same order for any number of tokens.
    """
    tokens, groups, size = x.shape
    tokens = 1 if pinned else tokens
    k_blocks = cdiv(size, K_BLOCK_BYTES // weight.element_size())
    rows, two_bytes = weight.shape[0] // groups, weight.element_size() == 2
    tiling = choose_tiling(gpu, tokens, groups, rows, k_blocks, two_bytes, whole, quantize)
    k_blocks_per_cta = cdiv(k_blocks, tiling.splits)
    return tiling._replace(splits=cdiv(k_blocks, k_blocks_per_cta)), k_blocks_per_cta


def ring_depth(tiling: SmallTiling, block_m: int, k_blocks: int, quantize: bool, most: int = 0) -> int:
    """Return the ring buffers that fit for a CTA of `k_blocks`; less than one if not even the rest fits.

    `most` is the largest number of K-blocks of a CTA in the same cluster launch, if it is larger than `k_blocks`.
    """
    free = SM_SHARED_BYTES // tiling.ctas_per_sm - CTA_RESERVED_BYTES - TILE_ALIGN
    free -= combine_mailbox_bytes(tiling.splits, block_m, tiling.block_n, max(k_blocks, most)) * tiling.cluster
    free -= 4 * power_of_two(k_blocks) * (tiling.block_n if tiling.block_n > layout.WEIGHT_TILE else 1)
    if quantize:
        free -= chunks_of(block_m, k_blocks) * chunk_of(block_m, k_blocks) * block_m * (K_BLOCK_BYTES + 4)
    else:
        free -= 4 * power_of_two(k_blocks) * block_m
    buffer = (tiling.block_n + block_m * (not quantize)) * K_BLOCK_BYTES + BUFFER_BARRIER_BYTES
    return min(k_blocks, free // buffer)


def chunk_of(block_m: int, k_blocks: int) -> int:
    """Return how many of its K-blocks of x a CTA quantizes together."""
    return min(power_of_two(k_blocks), max(1, MAX_QUANTIZED_ROWS // block_m))


def chunks_of(block_m: int, k_blocks: int) -> int:
    """Return the number of chunks that a CTA quantizes its K-blocks of x in."""
    return cdiv(k_blocks, chunk_of(block_m, k_blocks))


def chunking_of(x: Tensor, block_m: int, k_blocks: int) -> tuple[int, int]:
    """Return `chunk_of` and `chunks_of`; for bfloat16 twice the size, if that takes no more shared memory."""
    chunk, chunks = chunk_of(block_m, k_blocks), chunks_of(block_m, k_blocks)
    return (2 * chunk, chunks // 2) if x.dtype is torch.bfloat16 and chunks % 2 == 0 else (chunk, chunks)


def mmas_ahead(tiling: SmallTiling, block_m: int, k_blocks: int) -> int:
    """Return how many MMAs to issue before the first is scaled, spread evenly over the K-blocks."""
    return cdiv(k_blocks, cdiv(k_blocks, min(MAX_MMAS, MAX_MMA_SUMS // (tiling.block_n * block_m))))


def paced_k_blocks(gpu: Gpu, tiling: SmallTiling, tiles: int, ring: int, quantize: bool) -> int:
    """Return how many K-blocks of the weight a CTA keeps in flight at first, 0 for the whole ring.

    Only CTAs that share an SM but no tile are paced: the others would finish later.
    """
    if tiling.splits > 1 or tiling.ctas_per_sm == 1 or quantize:
        return 0
    resident = min(tiles, tiling.ctas_per_sm * gpu.sms)
    k_blocks = max(1, round(PACED_BYTES * gpu.sms / (resident * tiling.block_n * K_BLOCK_BYTES)))
    return k_blocks if k_blocks < ring else 0


def quantizes_at_once(x: Tensor, weight: Tensor, gpu: Gpu) -> bool:
    """Return whether a CTA quantizes x `[T, 1, K]` in one chunk; if not, a launch before the GEMM is faster."""
    return chunks_of(block_of(x.shape[0]), tiling_of(x, weight, gpu, True)[1]) == 1


def why_unsupported(x: Tensor, weight: Tensor, quantize: bool, gpu: Gpu) -> str:
    """Return why this kernel cannot take x `[T, G, K]` and `weight`, "" if it can."""
    tokens, most = x.shape[0], MAX_TILE_TOKENS if quantize else MAX_TOKENS
    if tokens > most:
        return f"it takes up to {most} tokens, not {tokens}"
    if tokens > MAX_TILE_TOKENS and weight.nbytes > MAX_BYTES:
        return f"for {tokens} tokens it takes weights up to {MAX_BYTES} bytes, not {weight.nbytes}"
    if quantize:
        tiling, k_blocks_per_cta = tiling_of(x, weight, gpu, True)
        if ring_depth(tiling, block_of(tokens), k_blocks_per_cta, True) < 1:
            return f"{k_blocks_per_cta} K-blocks of quantized x leave no shared memory for the weight"
    return why_unsupported_operands(x, weight, quantize)


def config_of(
    x: Tensor, weight: Tensor, tiling: SmallTiling, k_blocks: int, ring: int, quantize: bool, most: int = 0
) -> Config:  # fmt: skip
    """Return the constants of a GEMM of x `[T, G, K]` with K-blocks and ring buffers per CTA as given.

    `most` is the largest number of K-blocks of a CTA in the same cluster launch, if it is larger than `k_blocks`.
    """
    block_m, block_k, most = block_of(x.shape[0]), K_BLOCK_BYTES // weight.element_size(), max(k_blocks, most)
    rows = weight.shape[0] // x.shape[1]
    chunk, chunks = chunking_of(x, block_m, k_blocks)
    return Config(
        block_m=block_m,
        block_n=tiling.block_n,
        block_k=block_k,
        splits=tiling.splits,
        cluster=tiling.cluster,
        combine_tokens=tokens_per_combiner(tiling.splits, block_m, most),
        mailbox_bytes=combine_mailbox_bytes(tiling.splits, block_m, tiling.block_n, most) * tiling.cluster,
        k_blocks=power_of_two(k_blocks),
        chunk=chunk,
        chunks=chunks,
        ragged=quantize and x.shape[2] % K_BLOCK_BYTES > 0,
        ring=ring,
        resident=ring == k_blocks,
        one_scale=layout.WEIGHT_TILE % tiling.block_n == 0 and (x.shape[1] == 1 or rows % tiling.block_n == 0),
    )


def launch(
    operands: Operands, out: Tensor, quantize: bool, gpu: Gpu, out_scale: Tensor | None = None, pinned: bool = False
) -> None:
    """Fill `out` `[T, G * N]` like `gemm.grouped_gemm`.

    With `out_scale`, contiguous `[G * N / 128, T]`, results are quantized to e4m3; N is a multiple of 128 then. With
    `pinned` a token has the same bits in calls of any number of them, also more than `MAX_TOKENS`.
    """
    x, x_scale, weight, weight_scale = operands
    tokens, groups, size = x.shape
    inputs = tma_matrix(x, K_BLOCK_BYTES // weight.element_size())
    assert inputs is not None
    tiling, k_blocks_per_cta = tiling_of(x, weight, gpu, quantize, out_scale is not None, pinned)
    ring = ring_depth(tiling, block_of(tokens), k_blocks_per_cta, quantize)
    config = config_of(x, weight, tiling, k_blocks_per_cta, ring, quantize)
    token_blocks, rows = cdiv(tokens, config.block_m), weight.shape[0] // groups
    tiles = token_blocks * groups * cdiv(rows, tiling.block_n)
    alone = tiles * tiling.splits <= gpu.sms and config.resident and weight_scale is not None
    config = replace(
        config,
        mmas=mmas_ahead(tiling, config.block_m, k_blocks_per_cta) if alone else 1,
        pace=paced_k_blocks(gpu, tiling, tiles // token_blocks, ring, quantize),
    )
    partial_sums = arrived = None
    start = partial(launch_kernel, gemm_sm90_small_kernel, (tiles * tiling.splits,))
    if tiling.cluster:
        fetched = combine_fetched_bytes(config.block_m, tiling.block_n)
        start = partial(launch_clusters, gemm_sm90_small_kernel, tiles * tiling.splits, tiling.splits, fetched)
    elif tiling.splits > 1:
        shape = (tiling.splits, tiles, tiling.block_n * config.block_m)
        partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(tiles, x.device)
    start(
        tma_descriptor(weight, tiling.block_n, config.block_k),
        None if quantize else tma_descriptor(inputs.matrix, config.block_m, config.block_k),
        inputs.matrix if quantize else None,
        inputs.matrix.stride(0),
        out,
        out_scale,
        partial_sums,
        arrived,
        x_scale,
        weight_scale,
        out.stride(0),
        inputs.row,
        inputs.column,
        *((0, 0, 0) if x_scale is None else x_scale.stride()),
        *((0, 0) if weight_scale is None else weight_scale.stride()),
        tokens,
        token_blocks,
        groups,
        rows,
        size,
        k_blocks_per_cta,
        config=config,
        num_warps=tiling.warps,
        launch_pdl=True,
    )
