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
"""

from __future__ import annotations

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

from .. import layout
from .barriers_hopper import thread_barrier
from .cluster_hopper import place_inbox
from .copies_hopper import copy_tile
from .grouped_matmul_pace_hopper import await_paced, bring_paced
from .grouped_matmul_scales_hopper import add_scaled, put_rows, scales_of_weight, scales_of_x
from .grouped_matmul_shares_hopper import await_shares, store_shares
from .grouped_matmul_store_hopper import store_parts, store_tile
from .quant_strips_hopper import quantise_strips
from .views_hopper import FLAT, reinterpret

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
