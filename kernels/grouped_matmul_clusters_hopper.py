"""How the products of many tokens and few tiles are launched on Hopper: in clusters, whose programs share a tile.

Two of one input are also launched where there are as many tiles as programs, each for one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..layout import cdiv
from .cluster_hopper import SIZES, clusters_at_once, launch_clusters
from .gpu import Gpu
from .grouped_matmul_hopper import (
    MOST_BYTES,
    MOST_TOKENS,
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    TILE_ALIGN,
    operands_refused,
    rows_of,
    swizzled,
)
from .grouped_matmul_kernel_clusters_hopper import PAD, RESULTS_TOGETHER, grouped_matmul_clusters_hopper_kernel
from .grouped_matmul_kernel_hopper import STRIP_BYTES
from .grouped_matmul_kernel_many_hopper import HALF_TOKENS, TILE_ROWS
from .grouped_matmul_many_hopper import MULTIPLIER_REGISTERS, TILE_TOKENS, tiles_refused, words_of_scales
from .launch import launch_kernel

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
    return tokens > FEW_TOKENS and first.tiles + second.tiles <= gpu.processors


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
