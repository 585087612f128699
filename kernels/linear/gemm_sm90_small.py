"""The matrix product of few tokens on Hopper, in Gluon: weights as fast as memory gives them.

A program makes a tile of BLOCK_N outputs for BLOCK_M tokens. The copy engine brings its strips of the weight and of x
into a ring of buffers, as many at once as shared memory holds; the matrix unit reads them where they are. If x is to be
quantised, the warps load all that the program multiplies of it, and quantise it, while the weight is on its way. The
loop waits for memory nowhere but for a strip to arrive: under the load of the copies, a load of a few bytes takes as
long as a strip.

With few tokens an H200 is busy reading: the copies alone, of the 32 MiB of V4-Flash's wo_b, take 8.6 us out of memory
and 4.0 out of its cache, where a product takes 12 and 9 for one token. What gained nothing: the rest of a program's
strips on their way into the cache meanwhile, brought by the copy engine or by the quantisation in front (13.3 instead
of 12.1 out of memory for one token, 18.6 instead of 16.9 for 64); shallower rings, so that the next launch has room to
start its copies; copies of 8 or 32 rows at a time; two strips to a turn of the loop (10.0 instead of 9.4 for wq_b of
64 tokens); from 32 tokens on quantising here what a launch in front quantises (13.6 instead of 10.1 for 32); tiles of
256 rows, or of 128 tokens where there are as many.

The weight is nobody's result, so that its copies start before the kernel in front has ended, where that allows it.

How `grouped_matmul` launches its kernel for few tokens on Hopper.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ...layout import cdiv
from ..hopper.cluster_mailbox import SIZES, clusters_at_once, launch_clusters, place_inbox
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_operands import (
    add_scaled,
    await_paced,
    bring_paced,
    put_rows,
    quantise_strips,
    scales_of_weight,
    scales_of_x,
)
from .gemm_sm90_parts import (
    await_shares,
    bytes_of_inbox,
    bytes_put,
    store_parts,
    store_shares,
    store_tile,
    tokens_of_share,
)

COPY_ALIGN = 16
"""Bytes that what the copy engine reads starts at multiples of."""
STRIP_BYTES = layout.ACT_TILE
"""Of a row of the weight: what the matrix unit takes of it at a time, and of e4m3 what shares a scale."""

STRIP = gl.constexpr(STRIP_BYTES)


@gluon.jit
def _place(
    program, tokens, token_blocks, groups, rows, size, strips_each, SPLITS: gl.constexpr, CLUSTER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """What is program `program`'s: its tile, of how many, and its part, first token, group, block of rows, strips."""
    blocks = (rows + BLOCK_N - 1) // BLOCK_N
    tiles = groups * blocks * token_blocks
    # The first copy waits for what is divided by numbers that the compiler does not know.
    if CLUSTER or SPLITS == 1:
        tile, part = program // SPLITS, program % SPLITS
    else:
        tile, part = program % tiles, program // tiles
    # Neighbours share a tile of the weight.
    first_token, column = tile % token_blocks * BLOCK_M, tile // token_blocks
    # A copy fills in rows past the end at a fifth of its rate: the last tokens are rather multiplied twice.
    first_token = gl.minimum(first_token, gl.maximum(tokens - BLOCK_M, 0))
    if groups == 1:
        group, block = gl.to_tensor(0), column
    else:
        group, block = column // blocks, column % blocks
    begin = part * strips_each
    count = gl.minimum(strips_each, (size + BLOCK_K - 1) // BLOCK_K - begin)
    # Sums are zeroed once, and no loop is jumped over.
    gl.assume(count > 0)
    return tile, tiles, part, first_token, group, block, begin, count


@gluon.jit
def _start(
    weights, w_ring, ready, first_row, begin, filled, X_BYTES: gl.constexpr, BARRIERS: gl.constexpr,
    PACE: gl.constexpr,
):  # fmt: skip
    """Bring the first strips of the weight; `ready` awaits their part of x, too. Returns what `await_paced` takes."""
    RING: gl.constexpr = w_ring.shape[0]
    W_BYTES: gl.constexpr = w_ring.shape[1] * STRIP
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    for i in gl.static_range(BARRIERS):
        mbarrier.init(ready.index(i), count=RING // BARRIERS)
    fence_async_shared()
    thread_barrier()
    pace = None
    if PACE > 0:
        pace = bring_paced(weights, w_ring, first_row, begin, filled, PACE)
    for i in range(filled):
        mbarrier.expect(ready.index(i % BARRIERS), X_BYTES if PACE > 0 else W_BYTES + X_BYTES)
        if PACE == 0:
            copy_tile(weights, [first_row, (begin + i) * BLOCK_K], ready.index(i % BARRIERS), w_ring.index(i))
    if BARRIERS < RING:
        for _ in range(filled, RING):
            mbarrier.arrive(ready.index(0))
    return pace


@gluon.jit
def _sums(
    weights, inputs, rings, scales, ready, corner, begin, count, ACC: gl.constexpr, BARRIERS: gl.constexpr,
    WHOLE: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]` float32 of a program's strips. A ring that does not hold all of them is filled on the way.

    `inputs` is None where x is in shared memory, whole, and `scales` where there are none.
    """
    w_ring, x_ring = rings
    first_row, x_row, x_column = corner
    RING: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BYTES: gl.constexpr = (BLOCK_N if inputs is None else BLOCK_N + BLOCK_M) * STRIP
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    sums = warpgroup_mma_init(acc) if WHOLE else acc
    for first in range(0, count, TURN):
        if not WHOLE:
            # All have waited for the last product: what it read is free.
            thread_barrier()
            following = first - 1 + RING
            if (first > 0) & (following < count):
                free = following % RING
                o_k = (begin + following) * BLOCK_K
                mbarrier.expect(ready.index(free), BYTES)
                copy_tile(weights, [first_row, o_k], ready.index(free), w_ring.index(free))
                if inputs is not None:
                    copy_tile(inputs, [x_row, x_column + o_k], ready.index(free), x_ring.index(free))
        if BARRIERS == RING:
            mbarrier.wait(ready.index(first % RING), (first // RING) & 1)
        products = ()
        for ahead in gl.static_range(TURN):
            # Behind the last comes the last again.
            strip = gl.minimum(first + ahead, count - 1)
            w = w_ring.index(strip % RING)
            x = x_ring.index(strip if inputs is None else strip % RING)
            if scales is None:
                sums = warpgroup_mma(w, x.permute((1, 0)), sums, is_async=True)
                if not WHOLE:
                    sums = warpgroup_mma_wait(0, deps=[sums])
            else:
                product = warpgroup_mma(w, x.permute((1, 0)), zero, use_acc=False, is_async=True)
                products += (product,)  # type: ignore[assignment]
        if scales is not None:
            acc = add_scaled(acc, products, scales[0], scales[1], first, count, TURN)
    if scales is None:
        acc = warpgroup_mma_wait(0, deps=[sums])
    return acc


@gluon.jit
def _multiply(
    program, inbox, weights, inputs, p_x, x_stride, p_out, p_out_scale, p_part, p_arrived, p_x_scale, p_weight_scale,
    out_stride, x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride, x_scale_strip_stride,
    weight_scale_row_stride, weight_scale_strip_stride, tokens, token_blocks, groups, rows, size, strips_each,
    SPLITS: gl.constexpr, ONE_SCALE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, EACH: gl.constexpr, AT_ONCE: gl.constexpr, CHUNKS: gl.constexpr, RAGGED: gl.constexpr,
    RING: gl.constexpr, WHOLE: gl.constexpr, TILE: gl.constexpr, OUT_TILE: gl.constexpr, X: gl.constexpr,
    OUT: gl.constexpr, WARPS: gl.constexpr, CLUSTER: gl.constexpr, SHARE: gl.constexpr,
    INBOX: gl.constexpr, TURN: gl.constexpr, PACE: gl.constexpr,
):  # fmt: skip
    """The part of a product that is program `program`'s; see `grouped_matmul_hopper_kernel` for the arguments."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, BLOCK_K // 4]
    )
    QUANTIZE: gl.constexpr = inputs is None
    tile, tiles, part, first_token, group, block, begin, count = _place(
        program, tokens, token_blocks, groups, rows, size, strips_each, SPLITS, CLUSTER, BLOCK_M, BLOCK_N, BLOCK_K
    )
    first_row = group * rows + block * BLOCK_N
    x_row, x_column = group * x_group_row + first_token, group * x_group_column

    w_ring = gl.allocate_shared_memory(weights.dtype, [RING, BLOCK_N, BLOCK_K], TILE)
    if QUANTIZE:
        values = gl.allocate_shared_memory(weights.dtype, [CHUNKS, AT_ONCE * BLOCK_M, BLOCK_K], TILE)
    else:
        x_ring = gl.allocate_shared_memory(inputs.dtype, [RING, BLOCK_M, BLOCK_K], TILE)
    # Strips that a ring holds all of arrive at one barrier where they are scaled: to wait for one that is there takes
    # as long as to multiply it. Others are multiplied as they come.
    BARRIERS: gl.constexpr = 1 if WHOLE and p_weight_scale is not None else RING
    ready = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    # Short code, which a cold cache of instructions has sooner: with an end that is not known, loops stay loops.
    filled = gl.minimum(count, RING)
    X_BYTES: gl.constexpr = 0 if QUANTIZE else BLOCK_M * STRIP
    pace = _start(weights, w_ring, ready, first_row, begin, filled, X_BYTES, BARRIERS, PACE)
    gdc_launch_dependents()
    if INBOX > 0:
        await_shares(inbox, part, tokens, first_token, SPLITS, SHARE, BLOCK_M, BLOCK_N)
    gdc_wait()
    if not QUANTIZE:
        for i in range(filled):
            copy_tile(inputs, [x_row, x_column + (begin + i) * BLOCK_K], ready.index(i % BARRIERS), x_ring.index(i))

    scales = None
    if p_weight_scale is not None:
        # On its way before anything waits, and put where it is needed when something else has been waited for.
        w_scale = scales_of_weight(
            p_weight_scale, weight_scale_row_stride, weight_scale_strip_stride, group * rows, block, rows, begin,
            count, ONE_SCALE, BLOCK_N, EACH, WARPS,
        )  # fmt: skip
        if QUANTIZE:
            new_scales = gl.allocate_shared_memory(gl.float32, [CHUNKS, AT_ONCE * BLOCK_M], FLAT)
            p_x += group.to(gl.int64) * x_group_row * x_stride + group * x_group_column
            quantise_strips(
                p_x, x_stride, tokens, first_token, begin, count, size, values, new_scales, BLOCK_M, AT_ONCE, RAGGED, X,
            )  # fmt: skip
            x_scales = reinterpret(new_scales, gl.float32, [CHUNKS * AT_ONCE, BLOCK_M], FLAT)
            x_ring = reinterpret(values, weights.dtype, [CHUNKS * AT_ONCE, BLOCK_M, BLOCK_K], TILE)
        else:
            p_x_scale += group.to(gl.int64) * x_scale_group_stride
            x_scale = scales_of_x(
                p_x_scale, x_scale_token_stride, x_scale_strip_stride, tokens, first_token, begin, count, BLOCK_M,
                EACH, WARPS,
            )  # fmt: skip
            x_scales = put_rows(x_scale, EACH, BLOCK_M)
        scales = x_scales, put_rows(w_scale, EACH, w_scale.shape[1])
    if QUANTIZE:
        thread_barrier()
    if PACE > 0:
        await_paced(pace, filled, PACE)
    if BARRIERS < RING:
        mbarrier.wait(ready.index(0), 0)
    corner = first_row, x_row, x_column
    acc = _sums(
        weights, inputs, (w_ring, x_ring), scales, ready, corner, begin, count, ACC, BARRIERS, WHOLE, TURN
    )  # fmt: skip

    if CLUSTER:
        store_shares(
            acc, part, inbox, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows, SPLITS,
            SHARE, INBOX > 0, BLOCK_M, BLOCK_N, WARPS,
        )  # fmt: skip
    elif SPLITS > 1:
        store_parts(
            acc, part, tile, tiles, p_out, p_out_scale, p_part, p_arrived, out_stride, tokens, first_token, group,
            block, rows, SPLITS, BLOCK_M, BLOCK_N, OUT, OUT_TILE,
        )  # fmt: skip
    else:
        store_tile(
            acc, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows, BLOCK_M, BLOCK_N, OUT,
            OUT_TILE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_strip_stride",
        "tokens",
    ]
)  # fmt: skip
def grouped_matmul_hopper_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [BLOCK_N, BLOCK_K]
    inputs,  # descriptor of rows of x in blocks of [BLOCK_M, BLOCK_K], or None where x is quantised here
    p_x,  # rows of x then, else None
    x_stride,  # of a row
    p_out,  # [T, G * N], rows contiguous
    p_out_scale,  # of e4m3 results, float32 [G * N / 128, T], contiguous; or None
    p_part,  # [SPLITS, tiles, BLOCK_N * BLOCK_M] float32, contiguous; None for a cluster or a single part
    p_arrived,  # [>= tiles] int32, zero before and after, or None
    p_x_scale,  # [T, G, strips] float32, [T, G, words] int32, or None
    p_weight_scale,  # [blocks, strips] float32 or uint8, or None
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
    groups,
    rows,  # N
    size,  # K
    strips_each,  # of a program
    SPLITS: gl.constexpr,
    ONE_SCALE: gl.constexpr,  # the rows of a tile share their scales
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EACH: gl.constexpr,  # at least strips_each, a power of two
    AT_ONCE: gl.constexpr,  # strips of x that are quantised together
    CHUNKS: gl.constexpr,  # of so many, that hold all of a program's
    RAGGED: gl.constexpr,  # the last of x has less than 128 elements
    RING: gl.constexpr,
    WHOLE: gl.constexpr,  # the ring holds all strips of a program
    TILE: gl.constexpr,  # layouts in shared memory: of operands, of results
    OUT_TILE: gl.constexpr,
    X: gl.constexpr,  # layouts in registers: of strips of x, of results
    OUT: gl.constexpr,
    CLUSTER: gl.constexpr,  # the programs of a tile are one
    SHARE: gl.constexpr,  # tokens that a program of a cluster adds up
    INBOX: gl.constexpr,  # bytes that they are sent to, 0 where they are fetched
    TURN: gl.constexpr,  # strips that are multiplied at once
    PACE: gl.constexpr,  # strips of the weight that are on their way at a time at first, 0 for all
    num_warps: gl.constexpr,
):
    """Program p takes tile p % tiles and its strips from p // tiles * strips_each on.

    In clusters, the programs of a tile are neighbours: it takes tile p // SPLITS.
    """
    inbox = place_inbox(INBOX)
    _multiply(
        gl.program_id(0), inbox, weights, inputs, p_x, x_stride, p_out, p_out_scale, p_part, p_arrived, p_x_scale,
        p_weight_scale, out_stride, x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride,
        x_scale_strip_stride, weight_scale_row_stride, weight_scale_strip_stride, tokens, token_blocks, groups, rows,
        size, strips_each, SPLITS, ONE_SCALE, BLOCK_M, BLOCK_N, BLOCK_K, EACH, AT_ONCE, CHUNKS, RAGGED, RING, WHOLE,
        TILE, OUT_TILE, X, OUT, num_warps, CLUSTER, SHARE, INBOX, TURN, PACE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["p_arrived_of_others"])
def pair_hopper_kernel(
    weights,  # descriptor of [N, K] e4m3
    others,  # descriptor of [M, K] in the dtype of x
    inputs_of_others,  # descriptor of x [T, K] in blocks for the other
    p_x,  # the same
    x_stride,
    p_out,  # [T, N + M] float32
    p_part,  # of the one and of the other, see `grouped_matmul_hopper_kernel`
    p_part_of_others,
    p_arrived,
    p_arrived_of_others,
    p_weight_scale,  # [blocks, strips] float32 or uint8
    out_stride,
    weight_scale_row_stride,
    weight_scale_strip_stride,
    tokens,
    token_blocks,
    rows,  # N
    rows_of_others,  # M
    size,  # K
    strips_each,
    strips_each_of_others,
    first,  # program of the others
    SPLITS: gl.constexpr,
    SPLITS_OF_OTHERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_K_OF_OTHERS: gl.constexpr,
    EACH: gl.constexpr,
    EACH_OF_OTHERS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    CHUNKS: gl.constexpr,
    RAGGED: gl.constexpr,
    RING: gl.constexpr,
    RING_OF_OTHERS: gl.constexpr,
    WHOLE: gl.constexpr,
    WHOLE_OF_OTHERS: gl.constexpr,
    TILE: gl.constexpr,
    TILE_OF_OTHERS: gl.constexpr,
    OUT_TILE: gl.constexpr,
    X: gl.constexpr,
    OUT: gl.constexpr,
    CLUSTER: gl.constexpr,  # the programs of a tile are one, of as many for either
    SHARE: gl.constexpr,
    INBOX: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Two products of one x side by side: of x quantised here with e4m3, and of x as it is."""
    # One for both: in either branch it would be two.
    inbox = place_inbox(INBOX)
    if gl.program_id(0) < first:
        _multiply(
            gl.program_id(0), inbox, weights, None, p_x, x_stride, p_out, None, p_part, p_arrived, None,
            p_weight_scale, out_stride, 0, 0, 0, 0, 0, weight_scale_row_stride, weight_scale_strip_stride, tokens,
            token_blocks, 1, rows, size, strips_each, SPLITS, True, BLOCK_M, BLOCK_N, BLOCK_K, EACH, AT_ONCE, CHUNKS,
            RAGGED, RING, WHOLE, TILE, OUT_TILE, X, OUT, num_warps, CLUSTER, SHARE, INBOX, 1, 0,
        )  # fmt: skip
    else:
        _multiply(
            gl.program_id(0) - first, inbox, others, inputs_of_others, None, 0, p_out + rows, None, p_part_of_others,
            p_arrived_of_others, None, None, out_stride, 0, 0, 0, 0, 0, 0, 0, tokens, token_blocks, 1, rows_of_others,
            size, strips_each_of_others, SPLITS_OF_OTHERS, True, BLOCK_M, BLOCK_N, BLOCK_K_OF_OTHERS,
            EACH_OF_OTHERS, AT_ONCE, CHUNKS, False, RING_OF_OTHERS, WHOLE_OF_OTHERS, TILE_OF_OTHERS, OUT_TILE, X,
            OUT, num_warps, CLUSTER, SHARE, INBOX, 1, 0,
        )  # fmt: skip


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
    if (many or halves) and slim <= 2 * gpu.sms and not whole:
        splits = _most_splits(gpu, slim, strips // fewest, 2)
        if halves or splits == 1 or cdiv(strips, splits) <= 2 * fewest:
            block_n, tiles = 64, slim
        elif not quantize and tokens <= MOST_TOKENS_OF_A_TILE:
            return Cut(64, 4, 3, _most_splits(gpu, slim, strips // fewest, 3), True)
    if halves and block_m == MOST_TOKENS_OF_A_TILE and 10 * tiles > 9 * gpu.sms:
        # Sums of so many tokens cost more than the processors that are left idle.
        return Cut(block_n, 4, 1 if tiles <= gpu.sms else _room(gpu, block_n, tiles), 1)
    programs = _room(gpu, block_n, tiles)
    splits = _most_splits(gpu, tiles, strips // fewest, programs)
    alone = clusters_at_once(gpu, splits, 1) if splits > 1 else gpu.sms * (not halves)
    if many and tiles <= alone:
        programs = 1
    return Cut(block_n, 4, programs, splits, splits > 1)


def _room(gpu: Gpu, block_n: int, tiles: int) -> int:
    """Programs that a processor is to have room for."""
    return 3 if block_n == 128 and 2 * gpu.sms < tiles <= 3 * gpu.sms else 2


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
    at_once = min(tiles, cut.programs * gpu.sms)
    strips = max(1, round(PACED_BYTES * gpu.sms / (at_once * cut.block_n * STRIP_BYTES)))
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
    alone = tiles * cut.splits <= gpu.sms
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
