"""Two GEMMs of one x for few tokens in one sm_90 launch: quantized x with an e4m3 weight, x as it is with a second one.

The first CTAs compute the first GEMM, the rest the second. gemm_sm90_small.py describes the work of a CTA.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import layout
from ...layout import cdiv
from ..hopper.cluster_mailbox import CLUSTER_SIZES, allocate_mailbox, launch_clusters, max_clusters
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_epilogue import combine_fetched_bytes
from .gemm_sm90_operands import K_BLOCK_BYTES, tma_descriptor, tma_matrix, why_unsupported_operands
from .gemm_sm90_small import SmallTiling, block_of, compute_tile, config_of, ring_depth
from .gemm_sm90_small import why_unsupported as why_unsupported_small

BLOCK_N, WARPS, CTAS_PER_SM = 64, 4, 3
"""Rows of a tile, warps of a CTA, and CTAs per SM that must fit."""
FEW_TOKENS, LARGE_CLUSTER = 16, 8
"""Up to so many tokens in clusters of this size, one more CTA per SM must fit, so that copies of the next launch start
early."""


@gluon.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["p_arrived_2"])
def gemm_sm90_pair_kernel(
    weights,  # descriptor of [N, K] e4m3
    weights_2,  # descriptor of [M, K] in the dtype of x
    inputs_2,  # descriptor of x [T, K] in blocks for the second GEMM
    p_x,  # [T, K]
    x_stride,
    p_out,  # [T, N + M] float32
    p_partial,  # partial sums and arrival counters of either GEMM, see gemm_sm90_small_kernel
    p_partial_2,
    p_arrived,
    p_arrived_2,
    p_weight_scale,  # [row blocks, K-blocks] float32 or uint8
    out_stride,
    weight_scale_row_stride,
    weight_scale_k_stride,
    tokens,
    token_blocks,
    rows,  # N
    rows_2,  # M
    size,  # K
    k_blocks_each,
    k_blocks_each_2,
    first_2,  # first program of the second GEMM
    config: gl.constexpr,
    config_2: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute a tile of either GEMM per CTA, or a split of it. Clusters have the same size for both."""
    # One mailbox for both: a branch each would allocate two.
    mailbox = allocate_mailbox(config.mailbox_bytes)
    if gl.program_id(0) < first_2:
        compute_tile(
            gl.program_id(0), mailbox, (weights, None, p_x, x_stride, 0, 0),
            ((None, 0, 0, 0), (p_weight_scale, weight_scale_row_stride, weight_scale_k_stride)),
            (p_out, None, out_stride), (p_partial, p_arrived), (tokens, token_blocks, 1, rows, size, k_blocks_each),
            config, num_warps,
        )  # fmt: skip
    else:
        compute_tile(
            gl.program_id(0) - first_2, mailbox, (weights_2, inputs_2, None, 0, 0, 0), ((None, 0, 0, 0), (None, 0, 0)),
            (p_out + rows, None, out_stride), (p_partial_2, p_arrived_2),
            (tokens, token_blocks, 1, rows_2, size, k_blocks_each_2), config_2, num_warps,
        )  # fmt: skip


class PairTiling(NamedTuple):
    """Tiling of a launch: CTAs per tile of either weight, CTAs of a cluster or 0, and CTAs per SM that must fit."""

    splits: tuple[int, int]
    cluster: int
    ctas_per_sm: int


def choose_tiling(gpu: Gpu, tokens: int, k_blocks: tuple[int, int], tiles: tuple[int, int]) -> PairTiling:
    """Return the largest clusters that run in one wave, the same for both weights, else splits through memory."""
    for cluster in CLUSTER_SIZES:
        all_busy = all((cluster - 1) * cdiv(n, cluster) < n for n in k_blocks)
        if all_busy and sum(tiles) <= max_clusters(gpu, cluster, CTAS_PER_SM):
            more = tokens <= FEW_TOKENS and cluster == LARGE_CLUSTER
            pair = PairTiling((cluster, cluster), cluster, CTAS_PER_SM + more)
            if _fits(pair, tokens, k_blocks):
                return pair
    most = k_blocks_of_a_wave(gpu, *k_blocks, *tiles)
    return PairTiling((_whole_splits(k_blocks[0], most), _whole_splits(k_blocks[1], most)), 0, 2)


def k_blocks_each(pair: PairTiling, k_blocks: tuple[int, int]) -> list[int]:
    """Return the K-blocks per CTA for either weight."""
    return [cdiv(n, splits) for n, splits in zip(k_blocks, pair.splits, strict=True)]


def _tilings(pair: PairTiling) -> list[SmallTiling]:
    return [SmallTiling(BLOCK_N, WARPS, pair.ctas_per_sm, splits, pair.cluster > 0) for splits in pair.splits]


def ring_depths(pair: PairTiling, tokens: int, k_blocks: tuple[int, int]) -> list[int]:
    """Return the ring buffers that fit for a CTA of either weight; the first quantizes x."""
    block_m, k_blocks_per_cta = block_of(tokens), k_blocks_each(pair, k_blocks)
    return [
        ring_depth(tiling, block_m, n, i == 0, max(k_blocks_per_cta))
        for i, (tiling, n) in enumerate(zip(_tilings(pair), k_blocks_per_cta, strict=True))
    ]


def _fits(pair: PairTiling, tokens: int, k_blocks: tuple[int, int]) -> bool:
    """Return whether quantized x leaves two buffers for the first weight, one to multiply and one to load."""
    return ring_depths(pair, tokens, k_blocks)[0] >= min(2, k_blocks_each(pair, k_blocks)[0])


def sizes_of(x: Tensor, weight: Tensor, weight_2: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the K-blocks of either weight, and its tiles."""
    tokens, size = x.shape
    token_blocks = cdiv(tokens, block_of(tokens))
    k_blocks = cdiv(size, K_BLOCK_BYTES), cdiv(size, K_BLOCK_BYTES // weight_2.element_size())
    return k_blocks, (token_blocks * cdiv(weight.shape[0], BLOCK_N), token_blocks * cdiv(weight_2.shape[0], BLOCK_N))


def _whole_splits(k_blocks: int, each: int) -> int:
    """Return the CTAs per tile, none without a K-block, with `each` K-blocks at most."""
    return cdiv(k_blocks, cdiv(k_blocks, cdiv(k_blocks, each)))


def k_blocks_of_a_wave(gpu: Gpu, k_blocks: int, k_blocks_2: int, tiles: int, tiles_2: int) -> int:
    """Return the fewest K-blocks per CTA that let all CTAs, two per SM, run in one wave."""
    most = max(k_blocks, k_blocks_2)
    return next(
        n
        for n in range(1, most + 1)
        if n >= most or tiles * cdiv(k_blocks, n) + tiles_2 * cdiv(k_blocks_2, n) <= 2 * gpu.sms
    )


def why_unsupported(x: Tensor, weight: Tensor, weight_2: Tensor, gpu: Gpu) -> str:
    """Return why x `[T, K]` and both weights take two launches, "" if one will do."""
    if 0 in (weight.shape[0], weight_2.shape[0]):
        return f"both weights must have rows, they have {weight.shape[0]} and {weight_2.shape[0]}"
    if weight_2.dtype is not x.dtype or weight_2.element_size() != 2:
        return f"x and the second weight must have one dtype of two bytes, not {x.dtype} and {weight_2.dtype}"
    if weight.shape[0] % layout.WEIGHT_TILE:
        return f"the first weight must have a multiple of {layout.WEIGHT_TILE} rows, not {weight.shape[0]}"
    why = why_unsupported_operands(x[:, None], weight, True) or why_unsupported_small(x[:, None], weight_2, False, gpu)
    if why or x.shape[0] == 0:
        return why
    k_blocks, tiles = sizes_of(x, weight, weight_2)
    fits = _fits(choose_tiling(gpu, x.shape[0], k_blocks, tiles), x.shape[0], k_blocks)
    return "" if fits else f"quantized x of {x.shape[0]} tokens leaves no shared memory for the weight"


def uses_clusters(x: Tensor, weight: Tensor, weight_2: Tensor, gpu: Gpu) -> bool:
    """Return whether partial sums are combined in clusters, not through memory."""
    k_blocks, tiles = sizes_of(x, weight, weight_2)
    return choose_tiling(gpu, x.shape[0], k_blocks, tiles).cluster > 0


def launch(x: Tensor, weight: Tensor, weight_scale: Tensor, weight_2: Tensor, out: Tensor, gpu: Gpu) -> None:
    """Fill `out` `[T, N + M]` with the GEMMs of quantized x and `weight` `[N, K]`, and of x and `weight_2` `[M, K]`."""
    tokens, size = x.shape
    x = x[:, None]
    if weight_scale.dtype is torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    k_blocks, tiles = sizes_of(x[:, 0], weight, weight_2)
    pair = choose_tiling(gpu, tokens, k_blocks, tiles)
    k_blocks_per_cta, rings = k_blocks_each(pair, k_blocks), ring_depths(pair, tokens, k_blocks)
    config, config_2 = (
        config_of(x, of, tiling, n, ring, of is weight, max(k_blocks_per_cta))
        for of, tiling, n, ring in zip((weight, weight_2), _tilings(pair), k_blocks_per_cta, rings, strict=True)
    )
    inputs = tma_matrix(x, config_2.block_k)
    assert inputs is not None
    first_2 = tiles[0] * pair.splits[0]
    ctas = first_2 + tiles[1] * pair.splits[1]
    partial_sums: list[Tensor | None] = [None, None]
    counters: list[Tensor | None] = [None, None]
    if pair.cluster > 0:
        fetched = combine_fetched_bytes(config.block_m, BLOCK_N)
        start = partial(launch_clusters, gemm_sm90_pair_kernel, ctas, pair.cluster, fetched)
    else:
        start = partial(launch_kernel, gemm_sm90_pair_kernel, (ctas,))
        shapes = [(n, m, BLOCK_N * config.block_m) for n, m in zip(pair.splits, tiles, strict=True)]
        new = partial(torch.empty, dtype=torch.float32, device=x.device)
        partial_sums = [new(shape) if shape[0] > 1 else None for shape in shapes]
        both = arrival_counters(sum(tiles), x.device)
        counters = [both, both[tiles[0] :]]
    start(
        tma_descriptor(weight, BLOCK_N, config.block_k),
        tma_descriptor(weight_2, BLOCK_N, config_2.block_k),
        tma_descriptor(inputs.matrix, config.block_m, config_2.block_k),
        inputs.matrix,
        inputs.matrix.stride(0),
        out,
        *partial_sums,
        *counters,
        weight_scale,
        out.stride(0),
        *weight_scale.stride(),
        tokens,
        cdiv(tokens, config.block_m),
        weight.shape[0],
        weight_2.shape[0],
        size,
        *k_blocks_per_cta,
        first_2,
        config=config,
        config_2=config_2,
        num_warps=WARPS,
        launch_pdl=True,
    )
