"""How `grouped_matmul` launches its kernel for few tokens on Hopper."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import layout
from ..layout import cdiv
from .arrivals import arrival_counters
from .cluster_hopper import SIZES, clusters_at_once, launch_clusters
from .gpu import Gpu
from .grouped_matmul_kernel_hopper import COPY_ALIGN, STRIP_BYTES, grouped_matmul_hopper_kernel
from .grouped_matmul_shares_hopper import bytes_of_inbox, bytes_put, tokens_of_share
from .launch import launch_kernel

MOST_TOKENS, MOST_TOKENS_OF_A_TILE, MOST_BYTES = 128, 64, 16 << 20
"""Tokens in all, those that share a tile, and bytes of a weight that the tokens of two tiles may read twice. On an H200
128 tokens of V4-Flash's wq_a and wkv, 6 MiB, take 6.9 us, and 7.4 in tiles of 128; of wo_a and wo_b, 32 MiB, 15.9 and
16.9, and 14.4 and 15.2. In bfloat16 the former, 12 MiB, take 7.7, by torch 8.3 and in tiles of 128 13; with HCA's rows,
20 MiB, 12.6, and by torch 10.4."""
ROWS_AT_ONCE = 128
"""Strips of tokens that a program quantises together: as many as its registers hold of float32, of bfloat16 twice as
many. A weight whose programs have more is read faster behind a launch that quantises them, on an H200 wo_b of 16 tokens
in 8.2 us instead of 9.2, and out of memory in 11.6 instead of 11.8."""
MOST_STRIPS_OF_A_TURN, MOST_SUMS = 4, 1 << 14
"""What is multiplied before the first of it is scaled, by programs that have a processor to themselves and all strips
in a ring: an H200 then takes 0.1 to 0.5 us less for V4-Flash's wq_a and wkv. Where others use the time, an indexer's
wq_b takes 0.1 us longer; where strips follow each other, those of a turn leave the ring at the same time, and wo_b of
64 tokens takes 11.4 us instead of 10.2."""
PACED_BYTES = 64 << 10
"""Of a weight, for each processor, that are on their way at a time: they keep memory busy. All at once, 20 MB of
V4-Flash's wq_b, take memory 5 us, and what the kernels in front still load comes behind them: an H200 takes 0.3 to 1.9
us less for a layer whose wq_b is paced, and for 32 tokens of wq_b by itself 7.0 instead of 7.5, out of memory 10.3
instead of 11.4. 96 KiB are no better, and two strips of any size, with bfloat16 weights 128 KiB, take a layer of 64
tokens 3 us longer. Not paced is what comes late so: strips for programs that quantise x or share a tile in a cluster,
of wo_b by 1.5 to 2 us, and for programs alone on a processor, with a deep ring, of 64 tokens of wo_a in bfloat16 by
0.4."""
PROCESSOR_BYTES, RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of a processor, and what a program of any kind takes of it."""
TILE_ALIGN, BARRIERS_BYTES = 1024, 2 * 8
"""Of tiles; and of the barriers of a buffer, one for both operands and one for a weight that is paced."""


class Cut(NamedTuple):
    """How a launch is cut up: rows of a tile, warps, programs that a processor has room for, programs of a tile.

    Those of a tile may be a cluster, of 2 to 8, which needs no memory to add up its parts. `choose_cut` takes nothing
    else; `dsv4 bench gemm_tiles` compares it with parts in memory.
    """

    block_n: int
    warps: int
    programs: int
    splits: int
    cluster: bool = False


def block_of(tokens: int) -> int:
    """Tokens that a tile has room for."""
    return min(max(8, power_of_two(tokens)), MOST_TOKENS_OF_A_TILE)


def choose_cut(
    gpu: Gpu,
    tokens: int,
    groups: int,
    rows: int,
    strips: int,
    halves: bool,
    whole: bool = False,
    quantize: bool = False,
) -> Cut:
    """Tiles for `[tokens, groups * rows]` outputs of `strips` strips, `halves` for weights of two bytes.

    `whole` asks for tiles of 128 rows, which are a strip of what the product is quantised to; `quantize` says that x
    is quantised on the way.

    Measured on an H200 with the layers of V4-Flash. Few e4m3 tokens want large tiles: there the work on a strip of x
    takes as long for any. With more, and with elements that need no work, small tiles come in equal shares to all
    processors, unless there are many of them, each with its own share of x, or few, of more than 16 strips to a
    program. Three programs share a processor where the tiles of two would leave some for later: the 40960 rows of an
    indexer's layer take 9 us instead of 12. Programs that share a tile are a cluster, as large a one as runs at once;
    from 32 tokens on each has eight strips at least, and what room one has who is alone: of four, 32 tokens of wq_a and
    wkv take 6.2 us instead of 5.5; without that room 64 of an indexer's wq_b 5.9 instead of 4.8. Where that leaves
    small tiles more than 16 strips to a program, three share a processor if x comes quantised: wo_b takes 8.4 us for 32
    tokens, 11.0 for 64, and 11.0 and 12.8 out of memory, large tiles 9.2, 11.1, 11.2 and 13.2.
    """
    block_m = block_of(tokens)
    many = block_m > 16
    wide, slim = (cdiv(tokens, block_m) * groups * cdiv(rows, block_n) for block_n in (128, 64))
    fewest = 8 if many else 2
    block_n, tiles = 128, wide
    if (many or halves) and slim <= 2 * gpu.processors and not whole:
        splits = _most_splits(gpu, slim, strips // fewest, 2)
        if halves or splits == 1 or cdiv(strips, splits) <= 2 * fewest:
            block_n, tiles = 64, slim
        elif not quantize and tokens <= MOST_TOKENS_OF_A_TILE:
            return Cut(64, 4, 3, _most_splits(gpu, slim, strips // fewest, 3), True)
    if halves and block_m == MOST_TOKENS_OF_A_TILE and 10 * tiles > 9 * gpu.processors:
        # Sums of so many tokens cost more than the processors that are left idle.
        return Cut(block_n, 4, 1 if tiles <= gpu.processors else _room(gpu, block_n, tiles), 1)
    programs = _room(gpu, block_n, tiles)
    splits = _most_splits(gpu, tiles, strips // fewest, programs)
    alone = clusters_at_once(gpu, splits, 1) if splits > 1 else gpu.processors * (not halves)
    if many and tiles <= alone:
        programs = 1
    return Cut(block_n, 4, programs, splits, splits > 1)


def _room(gpu: Gpu, block_n: int, tiles: int) -> int:
    """Programs that a processor is to have room for."""
    return 3 if block_n == 128 and 2 * gpu.processors < tiles <= 3 * gpu.processors else 2


def _most_splits(gpu: Gpu, tiles: int, most: int, programs: int) -> int:
    """The largest clusters of which `tiles` run at once, of `most` programs at most."""
    return next((size for size in SIZES if size <= most and tiles <= clusters_at_once(gpu, size, programs)), 1)


def cut_of(x: Tensor, weight: Tensor, gpu: Gpu, quantize: bool, whole: bool = False) -> tuple[Cut, int]:
    """`choose_cut` of a product, no program of which is without a strip; and the strips of one."""
    tokens, groups, size = x.shape
    strips = cdiv(size, STRIP_BYTES // weight.element_size())
    rows, halves = weight.shape[0] // groups, weight.element_size() == 2
    cut = choose_cut(gpu, tokens, groups, rows, strips, halves, whole, quantize)
    each = cdiv(strips, cut.splits)
    return cut._replace(splits=cdiv(strips, each)), each


def deepest_ring(cut: Cut, block_m: int, each: int, quantize: bool, most: int = 0) -> int:
    """Buffers that there is room for beside everything else, for `each` strips; fewer than one where there is none.

    `most` strips are of another program of the cluster's launch, if it has more.
    """
    room = PROCESSOR_BYTES // cut.programs - RESERVED_BYTES - TILE_ALIGN
    room -= bytes_of_inbox(cut.splits, block_m, cut.block_n, max(each, most)) * cut.cluster
    room -= 4 * power_of_two(each) * (cut.block_n if cut.block_n > layout.WEIGHT_TILE else 1)
    if quantize:
        room -= chunks(block_m, each) * at_once(block_m, each) * block_m * (STRIP_BYTES + 4)
    else:
        room -= 4 * power_of_two(each) * block_m
    return min(each, room // ((cut.block_n + block_m * (not quantize)) * STRIP_BYTES + BARRIERS_BYTES))


def at_once(block_m: int, each: int) -> int:
    """Strips of x that a program quantises together, of `each`."""
    return min(power_of_two(each), max(1, ROWS_AT_ONCE // block_m))


def chunks(block_m: int, each: int) -> int:
    """How often it does."""
    return cdiv(each, at_once(block_m, each))


def loads_of(x: Tensor, block_m: int, each: int) -> tuple[int, int]:
    """`at_once` and `chunks` of a program's strips of x: of bfloat16 half as often where that takes no more memory."""
    few, often = at_once(block_m, each), chunks(block_m, each)
    return (2 * few, often // 2) if x.dtype is torch.bfloat16 and often % 2 == 0 else (few, often)


def strips_of_a_turn(cut: Cut, block_m: int, each: int) -> int:
    """How many strips are multiplied before one is scaled, in turns that are as full as may be."""
    return cdiv(each, cdiv(each, min(MOST_STRIPS_OF_A_TURN, MOST_SUMS // (cut.block_n * block_m))))


def strips_at_a_time(gpu: Gpu, cut: Cut, tiles: int, ring: int, quantize: bool) -> int:
    """Of the weight of one of so many tiles of rows, before the kernel in front ends; 0 for all of a ring."""
    if cut.splits > 1 or cut.programs == 1 or quantize:
        return 0
    at_once = min(tiles, cut.programs * gpu.processors)
    strips = max(1, round(PACED_BYTES * gpu.processors / (at_once * cut.block_n * STRIP_BYTES)))
    return strips if strips < ring else 0


def power_of_two(n: int) -> int:
    """The first that is not below n."""
    return 1 << (n - 1).bit_length()


class Rows(NamedTuple):
    """x as a matrix: the part of group g starts at row g * `row` and column g * `column`."""

    matrix: Tensor
    row: int
    column: int


def rows_of(x: Tensor, block_k: int) -> Rows | None:
    """x `[T, G, K]` as the copy engine takes it, None where it does not."""
    tokens, groups, size = x.shape
    token, group, element = x.stride()
    if tokens == 1:
        token = max(group * groups, size)
    if element != 1 or token * x.element_size() % COPY_ALIGN or x.data_ptr() % COPY_ALIGN:
        return None
    if groups == 1:
        return Rows(x.as_strided((tokens, size), (token, 1)), 0, 0)
    if group == tokens * token:
        return Rows(x.as_strided((groups * tokens, size), (token, 1)), tokens, 0)
    # The last strip of a group would reach into the next one.
    if group < size or size % block_k or token < groups * group:
        return None
    return Rows(x.as_strided((tokens, (groups - 1) * group + size), (token, 1)), 0, group)


def quantised_at_once(x: Tensor, weight: Tensor, gpu: Gpu) -> bool:
    """Whether this kernel should quantise x `[T, 1, K]`, rather than a launch in front of it."""
    return chunks(block_of(x.shape[0]), cut_of(x, weight, gpu, True)[1]) == 1


def hopper_refuses(x: Tensor, weight: Tensor, quantize: bool, gpu: Gpu) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    most = MOST_TOKENS_OF_A_TILE if quantize else MOST_TOKENS
    if x.shape[0] > most:
        return f"it takes up to {most} tokens"
    if x.shape[0] > MOST_TOKENS_OF_A_TILE and weight.numel() * weight.element_size() > MOST_BYTES:
        return f"it takes up to {MOST_TOKENS_OF_A_TILE} tokens of more than {MOST_BYTES} bytes"
    if quantize:
        cut, each = cut_of(x, weight, gpu, True)
        if deepest_ring(cut, block_of(x.shape[0]), each, True) < 1:
            return "its programs hold all that they quantise"
    return operands_refused(x, weight, quantize)


def operands_refused(x: Tensor, weight: Tensor, quantize: bool) -> str:
    """Why the copy engine or the matrix unit does not take them, or ""."""
    if (x.dtype is not weight.dtype and not quantize) or weight.element_size() > 2:
        return "it multiplies operands of the weight's dtype, of one or two bytes"
    if quantize and x.dtype is torch.bfloat16 and x.shape[-1] % 2:
        return "it quantises bfloat16 in pairs"
    if weight.stride(1) != 1 or weight.stride(0) * weight.element_size() % COPY_ALIGN or weight.data_ptr() % COPY_ALIGN:
        return f"it takes rows of the weight that start at multiples of {COPY_ALIGN} bytes"
    if rows_of(x, STRIP_BYTES // weight.element_size()) is None:
        return f"it takes rows of x that start at multiples of {COPY_ALIGN} bytes, or whole strips of them"
    return ""


# A layout takes the host as long to make as a launch: each is made once.
@functools.cache
def x_layout(rows: int, warps: int, pairs: bool) -> gl.BlockedLayout:
    """Of strips of x, or of `pairs`: every thread has some where that is possible, and as much of a row as it may."""
    each = max(STRIP_BYTES // 32, min(16, rows * STRIP_BYTES // (32 * warps)))
    lanes = STRIP_BYTES // each
    return gl.BlockedLayout([1, each // 2 if pairs else each], [32 // lanes, lanes], [warps, 1], [1, 0])


@functools.cache
def out_layout(block_n: int, warps: int) -> gl.BlockedLayout:
    """Of results: eight neighbours to a thread."""
    lanes = min(32, block_n // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


def swizzled(of: Tensor) -> gl.NVMMASharedLayout:
    """How the copy engine and the matrix unit have tiles of `of` in shared memory."""
    return _swizzled(8 * of.element_size())


@functools.cache
def _swizzled(bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


def launch_hopper(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out: Tensor,
    quantize: bool,
    gpu: Gpu,
    out_scale: Tensor | None = None,
) -> None:
    """Fill `out`, as the portable launcher does; or fill it with e4m3, and contiguous `out_scale` `[G * N / 128, T]`.

    Then N is a multiple of 128.
    """
    tokens, groups, size = x.shape
    block_k, rows = STRIP_BYTES // weight.element_size(), weight.shape[0] // groups
    inputs = rows_of(x, block_k)
    assert inputs is not None
    block_m = block_of(tokens)
    cut, each = cut_of(x, weight, gpu, quantize, out_scale is not None)
    token_blocks = cdiv(tokens, block_m)
    tiles = token_blocks * groups * cdiv(rows, cut.block_n)
    part = arrived = None
    if cut.splits > 1 and not cut.cluster:
        shape = (cut.splits, tiles, cut.block_n * block_m)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(tiles, x.device)
    ring = deepest_ring(cut, block_m, each, quantize)
    alone = tiles * cut.splits <= gpu.processors
    few, often = loads_of(x, block_m, each)
    start = partial(launch_kernel, grouped_matmul_hopper_kernel, (tiles * cut.splits,))
    if cut.cluster:
        room = bytes_put(block_m, cut.block_n)
        start = partial(launch_clusters, grouped_matmul_hopper_kernel, tiles * cut.splits, cut.splits, room)
    start(
        TensorDescriptor.from_tensor(weight, [cut.block_n, block_k], swizzled(weight)),
        None if quantize else TensorDescriptor.from_tensor(inputs.matrix, [block_m, block_k], swizzled(x)),
        inputs.matrix if quantize else None,
        inputs.matrix.stride(0),
        out,
        out_scale,
        part,
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
        each,
        SPLITS=cut.splits,
        ONE_SCALE=layout.WEIGHT_TILE % cut.block_n == 0 and (groups == 1 or rows % cut.block_n == 0),
        BLOCK_M=block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=block_k,
        EACH=power_of_two(each),
        AT_ONCE=few,
        CHUNKS=often,
        RAGGED=quantize and size % STRIP_BYTES > 0,
        RING=ring,
        WHOLE=ring == each,
        TILE=swizzled(weight),
        OUT_TILE=swizzled(out) if out_scale is None else _swizzled(16),
        X=x_layout(few * block_m, cut.warps, x.dtype is torch.bfloat16),
        OUT=out_layout(cut.block_n, cut.warps),
        CLUSTER=cut.cluster,
        SHARE=tokens_of_share(cut.splits, block_m, each),
        INBOX=bytes_of_inbox(cut.splits, block_m, cut.block_n, each) * cut.cluster,
        TURN=strips_of_a_turn(cut, block_m, each) if alone and ring == each and weight_scale is not None else 1,
        PACE=strips_at_a_time(gpu, cut, tiles // token_blocks, ring, quantize),
        num_warps=cut.warps,
        launch_pdl=True,
    )
