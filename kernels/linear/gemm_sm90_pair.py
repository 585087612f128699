"""How two products of one x, with e4m3 weights and with floating ones, are launched as one for few tokens on Hopper."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import layout
from ...layout import cdiv
from ..hopper.cluster_mailbox import SIZES, clusters_at_once, launch_clusters
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_parts import bytes_of_inbox, bytes_put, tokens_of_share
from .gemm_sm90_small import (
    STRIP_BYTES,
    Cut,
    block_of,
    deepest_ring,
    hopper_refuses,
    loads_of,
    operands_refused,
    out_layout,
    pair_hopper_kernel,
    power_of_two,
    rows_of,
    swizzled,
    x_layout,
)

BLOCK_N, WARPS, PROGRAMS = 64, 4, 3
"""Rows of a tile, and warps; programs that a processor has room for."""
FEW_TOKENS, MANY_PROGRAMS = 16, 8
"""Up to so many tokens in clusters of so many it has room for one more: of the next launch, whose copies start then."""


class PairCut(NamedTuple):
    """Programs of a tile of either weight, of a cluster, 0 for none, and those that a processor has room for."""

    splits: tuple[int, int]
    cluster: int
    programs: int


def choose_cut(gpu: Gpu, tokens: int, strips: tuple[int, int], blocks: tuple[int, int]) -> PairCut:
    """The largest clusters that run at once, with as many programs for a tile of either weight.

    On an H200, when strips were quantised one by one, V4-Flash's wq_a and wkv beside HCA's rows took 4.4 us for one
    token and 10.4 for 64, where parts in memory took 6.2 and 14.5; 32 take 5.6 now, and took 8.7. Clusters of 6, 5 or 4
    take 32 tokens 9.7 us where those of 8 take 8.1, with parts that are fetched. Half as many programs for the first
    weight, whose strips are half as many, give all as much to read, but take longer, and so do tiles of 128 rows. Of
    128 tokens, more than `pair_refuses` takes, HCA's rows took 18 us in a layer, and 17 in launches of their own; CSA's
    32, and 19.
    """
    for cluster in SIZES:
        whole = all((cluster - 1) * cdiv(n, cluster) < n for n in strips)
        if whole and sum(blocks) <= clusters_at_once(gpu, cluster, PROGRAMS):
            more = tokens <= FEW_TOKENS and cluster == MANY_PROGRAMS
            cut = PairCut((cluster, cluster), cluster, PROGRAMS + more)
            if _has_room(cut, tokens, strips):
                return cut
    each = strips_of_a_program(gpu, *strips, *blocks)
    return PairCut((_whole_splits(strips[0], each), _whole_splits(strips[1], each)), 0, 2)


def strips_each(pair: PairCut, strips: tuple[int, int]) -> list[int]:
    """Of a program of either weight."""
    return [cdiv(n, splits) for n, splits in zip(strips, pair.splits, strict=True)]


def rings(pair: PairCut, tokens: int, strips: tuple[int, int]) -> list[int]:
    """Buffers of a program of either weight, the first of which quantises."""
    cut = Cut(BLOCK_N, WARPS, pair.programs, max(1, pair.cluster), pair.cluster > 0)
    block_m = block_of(tokens)
    each = strips_each(pair, strips)
    return [deepest_ring(cut, block_m, n, i == 0, max(each)) for i, n in enumerate(each)]


def _has_room(pair: PairCut, tokens: int, strips: tuple[int, int]) -> bool:
    """For what a program quantises, and a strip of the weight that is multiplied while the next one comes."""
    return rings(pair, tokens, strips)[0] >= min(2, strips_each(pair, strips)[0])


def sizes_of(x: Tensor, weight: Tensor, others: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Strips of either weight, and its tiles."""
    tokens, size = x.shape
    token_blocks = cdiv(tokens, block_of(tokens))
    strips = cdiv(size, STRIP_BYTES), cdiv(size, STRIP_BYTES // others.element_size())
    return strips, (token_blocks * cdiv(weight.shape[0], BLOCK_N), token_blocks * cdiv(others.shape[0], BLOCK_N))


def _whole_splits(strips: int, each: int) -> int:
    """Programs of a tile, none without a strip, of which one has `each` strips at most."""
    return cdiv(strips, cdiv(strips, cdiv(strips, each)))


def strips_of_a_program(gpu: Gpu, strips: int, strips_2: int, blocks: int, blocks_2: int) -> int:
    """The fewest strips of either weight that a program can have if all programs, two to a processor, run at once."""
    return next(
        n
        for n in range(1, max(strips, strips_2) + 1)
        if n >= max(strips, strips_2) or blocks * cdiv(strips, n) + blocks_2 * cdiv(strips_2, n) <= 2 * gpu.sms
    )


def pair_refuses(x: Tensor, weight: Tensor, others: Tensor, gpu: Gpu) -> str:
    """Why two launches are needed, "" if one will do."""
    if 0 in (weight.shape[0], others.shape[0]):
        return "it takes two weights that have rows: the copy engine has no matrix without any"
    if others.dtype is not x.dtype or others.element_size() != 2:
        return "it multiplies the other weights with x as it is, in two bytes"
    if weight.shape[0] % layout.WEIGHT_TILE:
        return "it takes whole blocks of the weight"
    refused = operands_refused(x[:, None], weight, True) or hopper_refuses(x[:, None], others, False, gpu)
    if refused or x.shape[0] == 0:
        return refused
    strips, blocks = sizes_of(x, weight, others)
    room = _has_room(choose_cut(gpu, x.shape[0], strips, blocks), x.shape[0], strips)
    return "" if room else "its programs hold all that they quantise"


def in_clusters(x: Tensor, weight: Tensor, others: Tensor, gpu: Gpu) -> bool:
    """Whether a pair's programs add up their parts without memory."""
    strips, blocks = sizes_of(x, weight, others)
    return choose_cut(gpu, x.shape[0], strips, blocks).cluster > 0


def launch_pair(x: Tensor, weight: Tensor, weight_scale: Tensor, others: Tensor, out: Tensor, gpu: Gpu) -> None:
    """Fill `out` `[T, N + M]` with the products of x, quantised, and `weight` `[N, K]`, and of x and `others`."""
    tokens, size = x.shape
    block_m, block_k, block_k_2 = block_of(tokens), STRIP_BYTES, STRIP_BYTES // others.element_size()
    inputs = rows_of(x[:, None], block_k_2)
    assert inputs is not None
    if weight_scale.dtype is torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    strips, blocks = sizes_of(x, weight, others)
    pair = choose_cut(gpu, tokens, strips, blocks)
    splits, cluster = pair.splits, pair.cluster
    each, buffers = strips_each(pair, strips), rings(pair, tokens, strips)
    first = blocks[0] * splits[0]
    programs = first + blocks[1] * splits[1]
    few, often = loads_of(x, block_m, each[0])
    parts: list[Tensor | None] = [None, None]
    counters: list[Tensor | None] = [None, None]
    if cluster > 0:
        room = bytes_put(block_m, BLOCK_N)
        start = partial(launch_clusters, pair_hopper_kernel, programs, cluster, room)
    else:
        start = partial(launch_kernel, pair_hopper_kernel, (programs,))
        shapes = [(n, m, BLOCK_N * block_m) for n, m in zip(splits, blocks, strict=True)]
        parts = [torch.empty(shape, dtype=torch.float32, device=x.device) if shape[0] > 1 else None for shape in shapes]
        both = arrival_counters(sum(blocks), x.device)
        counters = [both, both[blocks[0] :]]
    start(
        TensorDescriptor.from_tensor(weight, [BLOCK_N, block_k], swizzled(weight)),
        TensorDescriptor.from_tensor(others, [BLOCK_N, block_k_2], swizzled(others)),
        TensorDescriptor.from_tensor(inputs.matrix, [block_m, block_k_2], swizzled(x)),
        inputs.matrix,
        inputs.matrix.stride(0),
        out,
        parts[0],
        parts[1],
        counters[0],
        counters[1],
        weight_scale,
        out.stride(0),
        *weight_scale.stride(),
        tokens,
        cdiv(tokens, block_m),
        weight.shape[0],
        others.shape[0],
        size,
        each[0],
        each[1],
        first,
        SPLITS=splits[0],
        SPLITS_OF_OTHERS=splits[1],
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        BLOCK_K_OF_OTHERS=block_k_2,
        EACH=power_of_two(each[0]),
        EACH_OF_OTHERS=power_of_two(each[1]),
        AT_ONCE=few,
        CHUNKS=often,
        RAGGED=size % STRIP_BYTES > 0,
        RING=buffers[0],
        RING_OF_OTHERS=buffers[1],
        WHOLE=buffers[0] == each[0],
        WHOLE_OF_OTHERS=buffers[1] == each[1],
        TILE=swizzled(weight),
        TILE_OF_OTHERS=swizzled(others),
        OUT_TILE=swizzled(out),
        X=x_layout(few * block_m, WARPS, x.dtype is torch.bfloat16),
        OUT=out_layout(BLOCK_N, WARPS),
        CLUSTER=cluster > 0,
        SHARE=tokens_of_share(max(1, cluster), block_m, max(each)),
        INBOX=bytes_of_inbox(cluster, block_m, BLOCK_N, max(each)) if cluster > 0 else 0,
        num_warps=WARPS,
        launch_pdl=True,
    )
