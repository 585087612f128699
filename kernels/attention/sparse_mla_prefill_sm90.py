"""Device functions of a Hopper warpgroup that gathers rows of a workspace into tiles of keys in shared memory.

Rows go there 16 bytes at a time without passing through registers, in the 128-byte swizzle that the matrix unit reads.
A block of keys has two halves with barriers of their own, so that work can begin on the first. Behind the first block
of an item it norms and turns the item's queries, if it is asked to.

Sparse attention over a flat workspace on Hopper, in Gluon: bfloat16, 512 dims, blocks of 64 heads.

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

Launch of the Hopper kernel for sparse attention over a flat workspace, and which calls it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_elements, copy_tile, store_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from .output_epilogue_sm90 import BLOCK_H, SWIZZLED, D, angles_of, column_blocks, here, store_finished, table_row
from .query_prologue_sm90 import norm_in_place
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, results_for
from .sparse_mla_prefill import Rows, outputs
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

BLOCK_N = gl.constexpr(64)  # keys of a block
BUFFERS = gl.constexpr(2)
HALF = gl.constexpr(layout.HEAD_DIM // 2)
SLICE = gl.constexpr(64)  # dims that one swizzled row holds
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # an element that all threads hold
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Arrivals that make a half ready: each thread's, when its copies have landed. The left half waits for what is
# known of its keys too.
RIGHT_ARRIVALS = gl.constexpr(128)
LEFT_ARRIVALS = gl.constexpr(129)


@gluon.jit
def _index_row(rows, token, RAGGED: gl.constexpr):
    """First index of a token, how many count and how many may be read, int32; see `index_row` of the portable kernel.

    `rows` are indices, bounds, the distance of two tokens' indices and of two bounds, width and total. How much of a
    matrix may be read is known without a load.
    """
    p_indices, p_bounds, index_stride, bound_stride, width, total = rows
    token = gl.to_tensor(token).to(gl.int64)
    if RAGGED:
        begin = gl.load(p_bounds + token * bound_stride).to(gl.int64)
        end = gl.load(p_bounds + (token + 1) * bound_stride).to(gl.int64)
        first = gl.maximum(begin, 0)
        last = gl.minimum(gl.minimum(end, begin + width), total)
        length = gl.maximum(last - first, 0).to(gl.int32)
        readable = length
        p_row = p_indices + gl.where(length > 0, first, 0)
    else:
        length = gl.to_tensor(width).to(gl.int32)
        readable = length
        if p_bounds is not None:
            bound = gl.load(p_bounds + token * bound_stride).to(gl.int64)
            length = gl.minimum(gl.maximum(bound, 0), width).to(gl.int32)
        p_row = p_indices + token * index_stride
    return p_row, length, readable


@gluon.jit
def block_count(rows, token, RAGGED: gl.constexpr):
    """Blocks of keys of a token, int32. One without keys has a block of zeros, so that every item is made alike."""
    _, length, _ = _index_row(rows, token, RAGGED)
    return gl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _first_block(rows, token, o_key, RAGGED: gl.constexpr):
    """As `_index_row`, but in the place of how many may be read the first of them."""
    p_row, length, readable = _index_row(rows, token, RAGGED)
    return p_row, length, gl.load(p_row + o_key, mask=o_key < readable, other=-1)


@gluon.jit
def gather_rows(
    p_kv, kv_stride, workspace_rows, rows, items, programs,
    k_left, k_right, lives, full, left_ready, right_ready, left_free, right_free,
    q_tile, q_ready, q_normed, scales, place, scale, eps,
    HEAD_BLOCKS: gl.constexpr, RAGGED: gl.constexpr, ROPE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Keys of the items program_id, program_id + programs, ..., block by block into a ring of buffers.

    Args:
        p_kv, kv_stride, workspace_rows: bfloat16 `[workspace_rows, 512]`; rows: what `_index_row` takes.
        k_left, k_right: bfloat16 `[BUFFERS, BLOCK_N, 256]`; lives: int32 `[BUFFERS, BLOCK_N]`, 1 for keys and 0 for
            what is none, which is zero in the tiles; full: int32 `[BUFFERS, 1]`, the least of them. Each `ready` and
            `free` is a barrier for each buffer.
        eps: of the queries' norm, None for queries that are ready. Then the other arguments named after them are not
            used. Else `norm_in_place` says what they are, and `q_normed` is done when an item's queries are.
    """
    o_key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIES))
    o_dim = gl.expand_dims(gl.arange(0, SLICE, gl.SliceLayout(0, COPIES)), 0)
    first = gl.program_id(0)
    number = 0
    q_phase = 0
    p_row, length, row = _first_block(rows, first // HEAD_BLOCKS, o_key, RAGGED)
    for item in range(first, items, programs):
        # What the next item starts with is on its way while this one is gathered.
        following = gl.minimum(item + programs, items - 1) // HEAD_BLOCKS
        p_next, next_length, next_first = p_row, length, row
        if eps is None:
            p_next, next_length, next_first = _first_block(rows, following, o_key, RAGGED)
        for start in range(0, gl.maximum(length, 1), BLOCK_N):
            column = start + BLOCK_N + o_key
            next_row = gl.load(p_row + column, mask=column < length, other=-1)
            live = (row >= 0) & (row < workspace_rows) & (start + o_key < length)
            p_keys = p_kv + (gl.expand_dims(gl.where(live, row, 0).to(gl.int64) * kv_stride, 1) + o_dim)
            m_key, _ = gl.broadcast(gl.expand_dims(live, 1), p_keys)
            live = live.to(gl.int32)
            least = gl.min(live, 0)
            buffer = number % BUFFERS
            phase = ((number // BUFFERS) & 1) ^ 1
            mbarrier.wait(left_free.index(buffer), phase)
            lives.index(buffer).store(live)
            full.index(buffer).store(gl.full([1], least, gl.int32, ONE))
            for part in gl.static_range(HALF // SLICE):
                tile = k_left.index(buffer).slice(part * SLICE, SLICE, 1)
                copy_elements(tile, p_keys + part * SLICE, mask=m_key)
            async_copy.mbarrier_arrive(left_ready.index(buffer), increment_count=False)
            thread_barrier()
            mbarrier.arrive(left_ready.index(buffer), count=1)
            mbarrier.wait(right_free.index(buffer), phase)
            for part in gl.static_range(HALF // SLICE):
                tile = k_right.index(buffer).slice(part * SLICE, SLICE, 1)
                copy_elements(tile, p_keys + (HALF + part * SLICE), mask=m_key)
            async_copy.mbarrier_arrive(right_ready.index(buffer), increment_count=False)
            if eps is not None and start == 0:
                now = here(item)
                norm_in_place(q_tile, q_ready, q_phase, scales, place, now // HEAD_BLOCKS, scale, eps, ROPE, SCORES)
                mbarrier.arrive(q_normed, count=1)
                q_phase ^= 1
                # No earlier: the norm has no registers for it.
                following = gl.minimum(now + programs, items - 1) // HEAD_BLOCKS
                p_next, next_length, next_first = _first_block(rows, following, o_key, RAGGED)
            row = next_row
            number += 1
        p_row, length, row = p_next, next_length, next_first


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


HEADS = 64
RIGHT_REGISTERS, GATHERER_REGISTERS = 168, 80
FUSED_RIGHT_REGISTERS = 176
"""Of a thread of the right warpgroup, where something is fused; the left one has 8 less for it."""
ROW_ALIGN = 16
"""Bytes that what is copied starts at multiples of; and elements, for Triton looks at strides as they are."""
MOST_ROPE, LIMIT = 64, 2**31
_HEAD_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def hopper_refuses(q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, fusion: Fusion = PLAIN) -> str:
    """Why this kernel cannot take a call that the portable one can, or what `fusion` adds to it; "" if it can."""
    _, heads, head_dim = q.shape
    if q.dtype is not torch.bfloat16 or kv.dtype is not torch.bfloat16 or head_dim != layout.HEAD_DIM or heads == 0:
        return f"it takes bfloat16 vectors of {layout.HEAD_DIM} dims"
    if q.stride(2) != 1 or kv.stride(1) != 1:
        return "it takes queries and keys that are rows"
    if kv.shape[0] == 0 or kv.stride(0) % ROW_ALIGN or kv.data_ptr() % ROW_ALIGN:
        return f"it takes a workspace that has rows, a multiple of {ROW_ALIGN} elements apart"
    apart = _strides(q)
    if min(apart) < head_dim or any(n * q.element_size() % ROW_ALIGN for n in apart) or q.data_ptr() % ROW_ALIGN:
        return f"it takes queries of their own that start at multiples of {ROW_ALIGN} bytes"
    if not scale > 0:
        return "it takes positive scales"
    table = fusion.cos_sin_cache
    if table is not None and (table.shape[1] > MOST_ROPE or table.stride(1) != 1 or table.stride(0) >= LIMIT):
        return f"it turns {MOST_ROPE} columns at most, by a table of rows"
    neighbours = [rows.indices] if sink is None else [rows.indices, sink]
    return "" if all(x.stride(-1) == 1 for x in neighbours) else "it takes indices and sinks that are neighbours"


def _strides(heads: Tensor) -> list[int]:
    """How far apart tokens and heads are. That of one may be anything, and is not used."""
    return [n if size > 1 else layout.HEAD_DIM for n, size in zip(heads.stride(), heads.shape[:2], strict=False)]


def _descriptor(heads: Tensor) -> TensorDescriptor:
    """`[T, H, 512]` in tiles of 64 heads and 256 dims."""
    return TensorDescriptor(
        heads, list(heads.shape), [*_strides(heads), 1], [1, HEADS, layout.HEAD_DIM // 2], _HEAD_ROWS
    )


def launch_hopper(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, gpu: Gpu
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `max_logits` and `lse`, as `launch` of the portable kernel."""
    out, max_logits, lse = outputs(q)
    _launch(Results(out, lse), max_logits, q, kv, rows, scale, sink, gpu, PLAIN)
    return out, max_logits, lse


def launch_fused(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, gpu: Gpu, fusion: Fusion
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, or values and scales, with all that `fusion` asks for: as `launch` of the decode kernels."""
    into = results_for(q, fusion)
    _launch(into, None, q, kv, rows, scale, sink, gpu, fusion)
    return into.pair()


def _launch(
    into: Results,
    max_logits: Tensor | None,
    q: Tensor,
    kv: Tensor,
    rows: Rows,
    scale: float,
    sink: Tensor | None,
    gpu: Gpu,
    fusion: Fusion,
) -> None:
    """Into results that are contiguous, but for those that the copy engine stores."""
    tokens, heads, _ = q.shape
    if tokens * heads == 0:
        return
    as_tiles = not fusion.inverse_rope and fusion.n_groups == 0
    if as_tiles and fusion.q_norm_eps is None:
        fusion = PLAIN  # a table that nobody reads is no reason to compile again
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    items = tokens * layout.cdiv(heads, HEADS)
    launch_kernel(
        sparse_mla_prefill_hopper_kernel,
        (min(items, gpu.sms),),
        _descriptor(q),
        _descriptor(into.out) if as_tiles else None,
        None if as_tiles else into.out,
        into.scale,
        max_logits,
        into.lse,
        kv,
        rows.indices,
        rows.bounds,
        sink,
        positions,
        table,
        scale * _LOG2_E.value,
        fusion.q_norm_eps,
        tokens,
        into.padded_tokens(),
        items,
        kv.stride(0),
        0 if rows.ragged else rows.indices.stride(0),
        0 if rows.bounds is None else rows.bounds.stride(0),
        position_stride,
        table_strides[0],
        max_pos,
        rows.width,
        rows.indices.numel(),
        kv.shape[0],
        RAGGED=rows.ragged,
        H=heads,
        RIGHT_REGISTERS=RIGHT_REGISTERS if fusion is PLAIN else FUSED_RIGHT_REGISTERS,
        GATHERER_REGISTERS=GATHERER_REGISTERS,
        num_warps=4,
        # A contracted multiply and add rounds once where the separate ops round twice.
        enable_fp_fusion=False,
        **fusion.constants(),
    )
