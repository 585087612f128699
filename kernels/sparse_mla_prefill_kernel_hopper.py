"""Sparse attention over a flat workspace on Hopper, in Gluon: bfloat16, 512 dims, blocks of 64 heads.

One program for each processor walks over (token, block of heads), 64 keys at a time. It is three warpgroups, between
which stand two buffers of keys, each of two halves with barriers of their own:

    left      scores, online softmax, dims 0 to 255 of the output with the weights straight from its registers;
              queries of the next item, by the copy engine
    right     dims 256 to 511, held back until half of the next scores are there: earlier they would delay these, later
              the left one's own product
    gatherer  rows of the workspace into swizzled tiles, 16 bytes at a time, without passing through registers

The left one sets the pace. Of the registers it has 256, right 168, the gatherer 80: with 208 for right, left would
spill. The output leaves by the copy engine too, by way of the keys that its item used last.

What decode fuses, this does too. Norm and RoPE of the next item's queries are the gatherer's, which has its first keys
on their way and waits for a buffer, while the others finish an output: it turns the columns that turn where they are,
and the norm is a factor of scores (queries_hopper.py). Rows rotated back or quantised leave in a loop over 16 heads at
a time (attention_rows_hopper.py), by way of the same keys. What is fused behind attention changes no bit of it.

On an H200 it takes less time than FlashMLA is known to, at every size (`dsv4 bench sparse_mla_prefill`;
examples/results/sparse_mla_prefill_h200_2026-11-20.json). A softmax that subtracts no maximum is faster still, and
outside the tolerances: subtracting it is what makes the largest weight of a row exactly 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attention_rows_hopper import BLOCK_H, SWIZZLED, D, angles_of, column_blocks, store_finished, table_row
from .barriers_hopper import thread_barrier
from .copies_hopper import copy_tile, store_tile
from .gather_rows_hopper import BLOCK_N, BUFFERS, HALF, LEFT_ARRIVALS, ONE, RIGHT_ARRIVALS, block_count, gather_rows
from .split_softmax import LN_2 as _LN_2
from .split_softmax import LOG2_E as _LOG2_E
from .views_hopper import FLAT, reinterpret

Q_BYTES = gl.constexpr(BLOCK_H.value * D.value * 2)
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)

SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N.value, 16])
)
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF.value, 16]))
HEAD_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))


@gluon.jit
def _head_rows(tile):
    """A tile `[64, 256]` as the copy engine sees it: heads of one token."""
    return reinterpret(tile, gl.bfloat16, [1, BLOCK_H, HALF], HEAD_ROWS)


@gluon.jit
def _load_q(queries, item, q_left, q_right, q_ready, HEAD_BLOCKS: gl.constexpr):
    """Start the copy of an item's queries. Heads behind the last one are zero."""
    token = item // HEAD_BLOCKS
    head = item % HEAD_BLOCKS * BLOCK_H
    mbarrier.expect(q_ready, Q_BYTES)
    copy_tile(queries, [token, head, 0], q_ready, _head_rows(q_left))
    copy_tile(queries, [token, head, HALF], q_ready, _head_rows(q_right))


@gluon.jit
def _scores(q_left, q_right, k_left, k_right, full, left_ready, right_ready, number):
    """Start the scores of block `number`; and 0 if it has something that is no key."""
    buffer = number % BUFFERS
    mbarrier.wait(left_ready.index(buffer), (number // BUFFERS) & 1)
    mbarrier.wait(right_ready.index(buffer), (number // BUFFERS) & 1)
    # The copies wrote through the generic proxy, the matrix unit reads through the asynchronous one.
    fence_async_shared()
    scores = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q_left, k_left.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_right, k_right.index(buffer).permute((1, 0)), scores, is_async=True)
    return scores, gl.min(full.index(buffer).load(ONE), 0)


@gluon.jit
def _masked(scores, live, whole, scale, NORMED: gl.constexpr):
    """`scores`, -inf in columns that are no keys, and the scale that is left: most blocks are whole, and unchanged.

    That of a head that is NORMED may be 0 or NaN, and -inf times it is NaN. So it is applied here.
    """
    if whole == 0:
        m_key = gl.expand_dims(live.load(gl.SliceLayout(0, SCORES)), 0) > 0
        if NORMED:
            scores = scores * gl.expand_dims(scale, 1)
            scale = gl.full([BLOCK_H], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
        scores = gl.where(m_key, scores, float("-inf"))
    return scores, scale


@gluon.jit
def _lane_sums(weights):
    """`[64, 8]`: sums over the part of a row that a thread holds."""
    return gl.sum(gl.reshape(weights, [BLOCK_H, BLOCK_N // 8, 8]), 1)


@gluon.jit
def _softmax(scores, acc, top, sums, turn, scale, keys, shared, NORMED: gl.constexpr):
    """Weights of a block: multiplied with the left half of the keys, and into shared memory for the right one.

    What is one instruction says so, and is the same one whatever is fused with it: for RoPE, products are not
    contracted.
    """
    weights_tile, factors, weights_ready, weights_free = shared
    # No scale is negative: it applies to the largest score, and to the others on their way into the exponent.
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    # -inf - -inf is NaN: a head without keys so far is shifted by zero.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = gl.exp2(top - shift)
    by_row = gl.expand_dims(scale, 1) if NORMED else scale
    weights = gl.exp2(gl.fma(scores, by_row, gl.expand_dims(shift * -1.0, 1)))
    rounded = weights.to(gl.bfloat16)
    operand = gl.convert_layout(rounded, gl.DotOperandLayout(0, OUTPUT, 2))
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT)), 1)
    acc = warpgroup_mma(operand, keys, acc, is_async=True)
    slot = turn % BUFFERS
    mbarrier.wait(weights_free.index(slot), ((turn // BUFFERS) & 1) ^ 1)
    weights_tile.index(slot).store(rounded)
    factors.index(slot).store(rescale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(weights_ready.index(slot), count=1)
    by_sum = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout)), 1)
    return acc, operand, new_top, gl.fma(sums, by_sum, _lane_sums(weights))


@gluon.jit
def _store_half(acc, tile, out, item, FIRST: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Start the copy of dims FIRST to FIRST + 255 of an item's output, by way of `tile`, keys that nobody needs.

    The copy engine leaves out heads behind the last one. No branch is taken for some threads of a warp: the products
    and copies that follow are instructions of whole warps.
    """
    tile.store(acc.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    store_tile(out, [item // HEAD_BLOCKS, item % HEAD_BLOCKS * BLOCK_H, FIRST], _head_rows(tile))


@gluon.jit
def _store_rows(
    acc, tile, results, item, p_cos, FIRST: gl.constexpr, H: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
    ROPE: gl.constexpr, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As `_store_half`, turned back where there is a `p_cos`, and quantised. It is done when it returns."""
    p_out, p_scale, tokens, padded_tokens = results
    store_finished(
        acc, tile, p_out, p_scale, tokens, padded_tokens, gl.to_tensor(item // HEAD_BLOCKS).to(gl.int64),
        item % HEAD_BLOCKS * BLOCK_H, p_cos, FIRST, H, ROPE, GROUPS, GROUP_HEADS, PACKED,
    )  # fmt: skip


@gluon.jit
def _left(
    queries, p_sink, out, results, p_max, p_lse, scale, rows, items, programs,
    q_left, q_right, q_ready, q_normed, scales, k_left, k_right, lives, full, left_ready, right_ready, left_free,
    shared, scores_done,
    H: gl.constexpr, HEAD_BLOCKS: gl.constexpr, RAGGED: gl.constexpr, ROPE: gl.constexpr, NORMED: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, softmax, the left half of the output."""
    factors, weights_ready, weights_free = shared[1], shared[2], shared[3]
    o_row = gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    first = gl.program_id(0)
    number = 0  # of blocks so far
    turn = 0  # of the weights' buffers: one for each block, and one for the factor at the end of an item
    q_phase = 0
    _load_q(queries, first, q_left, q_right, q_ready, HEAD_BLOCKS)
    for item in range(first, items, programs):
        blocks = block_count(rows, item // HEAD_BLOCKS, RAGGED)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
        top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        sums = _lane_sums(gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES))
        mbarrier.wait(q_ready, q_phase)
        if NORMED:
            mbarrier.wait(q_normed, q_phase)
        by_head = scales.load(gl.SliceLayout(1, SCORES)) if NORMED else scale
        q_phase ^= 1
        scores, whole = _scores(q_left, q_right, k_left, k_right, full, left_ready, right_ready, number)
        if out is not None:
            # Under these scores the output of the item before leaves the keys that it used last.
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(left_free.index((number + 1) % BUFFERS), count=1, pred=item != first)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for _ in range(blocks - 1):
            buffer = number % BUFFERS
            scores, rest = _masked(scores, lives.index(buffer), whole, by_head, NORMED)
            acc, operand, top, sums = _softmax(scores, acc, top, sums, turn, rest, k_left.index(buffer), shared, NORMED)
            scores, whole = _scores(q_left, q_right, k_left, k_right, full, left_ready, right_ready, number + 1)
            acc, operand = warpgroup_mma_wait(2, deps=[acc, operand])
            thread_barrier()
            mbarrier.arrive(left_free.index(buffer), count=1)
            # The first half of the scores: a hint for the right warpgroup.
            operand = warpgroup_mma_wait(1, deps=[operand])
            mbarrier.arrive(scores_done.index(buffer), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            number += 1
            turn += 1
        thread_barrier()
        if item + programs < items:
            _load_q(queries, item + programs, q_left, q_right, q_ready, HEAD_BLOCKS)
        buffer = number % BUFFERS
        scores, rest = _masked(scores, lives.index(buffer), whole, by_head, NORMED)
        acc, operand, top, sums = _softmax(scores, acc, top, sums, turn, rest, k_left.index(buffer), shared, NORMED)
        mbarrier.arrive(scores_done.index(buffer), count=1)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        number += 1
        turn += 1
        head = item % HEAD_BLOCKS * BLOCK_H
        m_head = head + o_row < H
        shift = gl.where(top == float("-inf"), 0.0, top)
        sum_all = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
        denominator = sum_all
        if p_sink is not None:
            denominator += gl.exp2(gl.fma(gl.load(p_sink + head + o_row, mask=m_head, other=0.0), LOG2_E, shift * -1.0))
        factor = gl.where(sum_all == 0, 0.0, 1.0 / denominator)
        slot = turn % BUFFERS
        mbarrier.wait(weights_free.index(slot), ((turn // BUFFERS) & 1) ^ 1)
        factors.index(slot).store(factor)
        thread_barrier()
        mbarrier.arrive(weights_ready.index(slot), count=1)
        turn += 1
        acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), 1)
        if out is not None:
            _store_half(acc, k_left.index(buffer), out, item, 0, HEAD_BLOCKS)
        result = gl.to_tensor(item // HEAD_BLOCKS).to(gl.int64) * H + head
        if p_lse is not None:
            lse = gl.where(sum_all == 0, float("inf"), (shift + gl.log2(sum_all)) * LN_2)
            gl.store(p_lse + result + o_row, lse, mask=m_head)
        if p_max is not None:
            gl.store(p_max + result + o_row, top * LN_2, mask=m_head)
        if out is None:
            _store_rows(
                acc, k_left.index(buffer), results, item, None, 0, H, HEAD_BLOCKS, ROPE, GROUPS, GROUP_HEADS, PACKED,
            )  # fmt: skip
            mbarrier.arrive(left_free.index(buffer), count=1)
    if out is not None:
        tma.store_wait(0)


@gluon.jit
def _right(
    out, results, place, rows, items, programs, k_right, right_ready, right_free, shared, scores_done,
    H: gl.constexpr, HEAD_BLOCKS: gl.constexpr, RAGGED: gl.constexpr, ROPE: gl.constexpr, INVERSE: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: the right half of the output."""
    weights_tile, factors, weights_ready, weights_free = shared
    first = gl.program_id(0)
    number = 0
    turn = 0
    for item in range(first, items, programs):
        blocks = block_count(rows, item // HEAD_BLOCKS, RAGGED)
        if INVERSE:
            row = table_row(place, item // HEAD_BLOCKS)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
        for block in range(blocks):
            buffer, slot = number % BUFFERS, turn % BUFFERS
            mbarrier.wait(right_ready.index(buffer), (number // BUFFERS) & 1)
            mbarrier.wait(weights_ready.index(slot), (turn // BUFFERS) & 1)
            fence_async_shared()
            acc = acc * gl.expand_dims(factors.index(slot).load(gl.SliceLayout(1, OUTPUT)), 1)
            mbarrier.wait(scores_done.index(buffer), (number // BUFFERS) & 1)
            acc = warpgroup_mma(weights_tile.index(slot), k_right.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
            mbarrier.arrive(weights_free.index(slot), count=1)
            mbarrier.arrive(right_free.index(buffer), count=1, pred=block + 1 < blocks)
            number += 1
            turn += 1
        slot = turn % BUFFERS
        mbarrier.wait(weights_ready.index(slot), (turn // BUFFERS) & 1)
        factor = factors.index(slot).load(gl.SliceLayout(1, OUTPUT))
        thread_barrier()
        mbarrier.arrive(weights_free.index(slot), count=1)
        turn += 1
        # The keys that the item used last make room for its output.
        buffer = (number + 1) % BUFFERS
        acc = acc * gl.expand_dims(factor, 1)
        p_cos = angles_of(place, row) if INVERSE else None
        if out is not None:
            _store_half(acc, k_right.index(buffer), out, item, HALF, HEAD_BLOCKS)
            tma.store_wait(0)
            thread_barrier()
        else:
            _store_rows(
                acc, k_right.index(buffer), results, item, p_cos, HALF, H, HEAD_BLOCKS, ROPE, GROUPS, GROUP_HEADS,
                PACKED,
            )  # fmt: skip
        mbarrier.arrive(right_free.index(buffer), count=1)


@gluon.jit(
    do_not_specialize=["items", "width", "total", "workspace_rows", "tokens", "padded_tokens", "max_pos"],
    do_not_specialize_on_alignment=["p_bounds", "p_positions"],
)
def sparse_mla_prefill_hopper_kernel(
    queries,  # descriptor of [T, H, 512] bfloat16 in blocks of [1, 64, 256]
    out,  # the same, or None where rows are rotated back or quantised
    p_out,  # then [T, H, 512] bfloat16 or e4m3 [GROUPS, T, K], contiguous
    p_scale,  # of e4m3, see attention_rows_hopper.store_rows
    p_max,  # [T, H] float32, contiguous, or None
    p_lse,  # [T, H] float32, contiguous, or None
    p_kv,  # [workspace_rows, 512] bfloat16
    p_indices,  # [T, width] int, or [total] int
    p_bounds,  # [T] int or None, or [T + 1] int
    p_sink,  # [H] float32 or None, contiguous
    p_positions,  # [T] int or None
    p_table,  # [max_pos, ROPE] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the queries' norm, None for queries that are ready
    tokens,
    padded_tokens,
    items,  # tokens times blocks of heads
    kv_stride,
    index_stride,
    bound_stride,
    position_stride,
    table_stride,
    max_pos,
    width,
    total,
    workspace_rows,
    RAGGED: gl.constexpr,
    H: gl.constexpr,
    ROPE: gl.constexpr,
    INVERSE: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
    GATHERER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program p takes every num_programs-th item from item p on; item i is head block i % HEAD_BLOCKS of a token."""
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    if eps is None:
        # Two tiles: as views of one, with addresses of their own, 640 keys took an H200 4% longer.
        q_left = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, HALF], SWIZZLED)
        q_right = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, HALF], SWIZZLED)
        q_tile = q_left  # which nobody norms
    else:
        q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
        q_left, q_right = column_blocks(q_tile, HALF).index(0), column_blocks(q_tile, HALF).index(1)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, HALF], SWIZZLED)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, HALF], SWIZZLED)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_H, BLOCK_N], SWIZZLED)
    factors = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_H], FLAT)
    scales = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    lives = gl.allocate_shared_memory(gl.int32, [BUFFERS, BLOCK_N], FLAT)
    full = gl.allocate_shared_memory(gl.int32, [BUFFERS, 1], FLAT)
    left_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    # A ring of two: with one, the left warpgroup could arrive twice before the right one looks, and that would wait
    # for ever.
    scores_done = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_normed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    if eps is not None:
        mbarrier.init(q_normed, count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(left_ready.index(i), count=LEFT_ARRIVALS)
        mbarrier.init(right_ready.index(i), count=RIGHT_ARRIVALS)
        mbarrier.init(left_free.index(i), count=1)
        mbarrier.init(right_free.index(i), count=1)
        mbarrier.init(weights_ready.index(i), count=1)
        mbarrier.init(weights_free.index(i), count=1)
        mbarrier.init(scores_done.index(i), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    rows = p_indices, p_bounds, index_stride, bound_stride, width, total
    shared = weights_tile, factors, weights_ready, weights_free
    place = p_positions, position_stride, p_table, table_stride, max_pos
    results = p_out, p_scale, tokens, padded_tokens
    gl.warp_specialize([
        (_left, (queries, p_sink, out, results, p_max, p_lse, scale, rows, items, programs, q_left, q_right, q_ready,
                 q_normed, scales, k_left, k_right, lives, full, left_ready, right_ready, left_free, shared,
                 scores_done, H, HEAD_BLOCKS, RAGGED, ROPE, eps is not None, GROUPS, GROUP_HEADS, PACKED)),
        (_right, (out, results, place, rows, items, programs, k_right, right_ready, right_free, shared, scores_done,
                  H, HEAD_BLOCKS, RAGGED, ROPE, INVERSE, GROUPS, GROUP_HEADS, PACKED)),
        (gather_rows, (p_kv, kv_stride, workspace_rows, rows, items, programs, k_left, k_right, lives, full,
                       left_ready, right_ready, left_free, right_free, q_tile, q_ready, q_normed, scales, place, scale,
                       eps, HEAD_BLOCKS, RAGGED, ROPE, SCORES)),
    ], [4, 4], [RIGHT_REGISTERS, GATHERER_REGISTERS])  # fmt: skip
