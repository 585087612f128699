"""Sparse attention over a flat workspace on sm_90, in Gluon: bfloat16, 512 dims, blocks of 64 heads.

One program for each SM walks over (token, block of heads), 64 keys at a time. Its three warpgroups share two buffers of
keys. Each buffer is two halves of dims, and each half has its own barriers:

    left      scores, online softmax, dims 0 to 255 of the output, queries of the next item by TMA
    right     dims 256 to 511, delayed until half of the next scores are done: earlier they would delay these, later
              the left one's own GEMM
    gatherer  copies rows of the workspace into swizzled tiles, 16 bytes at a time, without registers

The left one sets the pace; its 256 registers leave 168 for right and 80 for the gatherer. Outputs leave by TMA through
the keys that their item used last.

The gatherer norms and rotates the next item's queries, after it has requested their first keys. Rows that are rotated
back or quantised leave in a loop over 16 heads (prologue_epilogue_sm90.py). No fused part changes a bit of attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .common import NOT_FUSED, FusedParts, Outputs, outputs_for
from .prologue_epilogue_sm90 import (
    BLOCK_H,
    SWIZZLED,
    AngleTable,
    D,
    SharedQueries,
    column_blocks,
    cosines_of,
    norm_in_shared_memory,
    opaque,
    store_finished,
    table_row,
)
from .sparse_mla_prefill import PrefillCall, new_outputs
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

BLOCK_N = gl.constexpr(64)  # keys of a block
BUFFERS = gl.constexpr(2)
HALF = gl.constexpr(layout.HEAD_DIM // 2)
SLICE = gl.constexpr(64)  # dims of one swizzled row
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # an element that all threads hold
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Arrivals that make a half ready: each thread's, when its copies have landed; and for the left half, one for the flags
# of its keys.
RIGHT_ARRIVALS = gl.constexpr(128)
LEFT_ARRIVALS = gl.constexpr(129)
Q_BYTES = gl.constexpr(BLOCK_H.value * D.value * 2)
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)

SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N.value, 16])
)
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF.value, 16]))
HEAD_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))


class Items(NamedTuple):
    """Items of a launch, each a block of heads of one token, and the index rows of all tokens.

    Attributes:
        p_indices, p_bounds, index_stride, bound_stride, width, total: see `IndexRows`; strides from token to token.
        items, programs: number of items, and of programs that walk over them.
    """

    p_indices: Any
    p_bounds: Any
    index_stride: Any
    bound_stride: Any
    width: Any
    total: Any
    items: Any
    programs: Any


class KeyRing(NamedTuple):
    """Buffers of keys in shared memory, and their barriers.

    Attributes:
        left, right: bfloat16 `[BUFFERS, BLOCK_N, 256]`, the two halves of dims.
        lives: int32 `[BUFFERS, BLOCK_N]`, 1 for keys and 0 for invalid ones, which are zero in the tiles.
        full: int32 `[BUFFERS, 1]`, the least of `lives`.
    """

    left: Any
    right: Any
    lives: Any
    full: Any
    left_ready: Any
    right_ready: Any
    left_free: Any
    right_free: Any


class Weights(NamedTuple):
    """Softmax weights and factors of a block that left hands to right, in shared memory, with barriers."""

    tile: Any
    factors: Any
    ready: Any
    free: Any
    scores_done: Any


class LeftQueries(NamedTuple):
    """Queries as the left warpgroup sees them: TMA descriptor, both halves, and the barriers of their arrival and norm.

    `scales` are shared factors of scores of normed heads; `scale` is that of all others.
    """

    descriptor: Any
    left: Any
    right: Any
    ready: Any
    normed: Any
    scales: Any
    scale: Any


class LeftResults(NamedTuple):
    """Sinks that the left warpgroup reads and logits that it writes, each a pointer or None."""

    p_sink: Any
    p_max: Any
    p_lse: Any


@gluon.jit
def _index_row(items, token, RAGGED: gl.constexpr):
    """Return the pointer to a token's first index, its valid indices, and how many may be read, int32.

    It is `index_row` of the Triton kernel. The readable part of a matrix is known without a load.
    """
    width, total = items.width, items.total
    token = gl.to_tensor(token).to(gl.int64)
    if RAGGED:
        begin = gl.load(items.p_bounds + token * items.bound_stride).to(gl.int64)
        end = gl.load(items.p_bounds + (token + 1) * items.bound_stride).to(gl.int64)
        first = gl.maximum(begin, 0)
        last = gl.minimum(gl.minimum(end, begin + width), total)
        length = gl.maximum(last - first, 0).to(gl.int32)
        readable = length
        p_row = items.p_indices + gl.where(length > 0, first, 0)
    else:
        length = gl.to_tensor(width).to(gl.int32)
        readable = length
        if items.p_bounds is not None:
            bound = gl.load(items.p_bounds + token * items.bound_stride).to(gl.int64)
            length = gl.minimum(gl.maximum(bound, 0), width).to(gl.int32)
        p_row = items.p_indices + token * items.index_stride
    return p_row, length, readable


@gluon.jit
def _block_count(items, token, RAGGED: gl.constexpr):
    """Return the number of blocks of keys of a token, int32; a token without keys has one block of zeros."""
    _, length, _ = _index_row(items, token, RAGGED)
    return gl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _first_block(items, token, o_key, RAGGED: gl.constexpr):
    """Return the pointer to a token's first index, its valid indices, and the indices of the first block."""
    p_row, length, readable = _index_row(items, token, RAGGED)
    return p_row, length, gl.load(p_row + o_key, mask=o_key < readable, other=-1)


@gluon.jit
def _gatherer(workspace, items, ring, queries, H: gl.constexpr, RAGGED: gl.constexpr, EPILOGUE: gl.constexpr):
    """Run the third warpgroup: copy keys of the items program_id, program_id + programs, ... into the ring of buffers.

    Args:
        workspace: pointers to bfloat16 `[first_rows, 512]` and to more rows or None, their stride, and both counts.
        queries: `SharedQueries`, which are normed and rotated if there is an eps.
    """
    p_kv, p_more, kv_stride, first_rows, workspace_rows = workspace
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    o_key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIES))
    o_dim = gl.expand_dims(gl.arange(0, SLICE, gl.SliceLayout(0, COPIES)), 0)
    first = gl.program_id(0)
    number = 0
    q_phase = 0
    p_row, length, row = _first_block(items, first // HEAD_BLOCKS, o_key, RAGGED)
    for item in range(first, items.items, items.programs):
        # The first indices of the next item are in flight while this one is gathered.
        following = gl.minimum(item + items.programs, items.items - 1) // HEAD_BLOCKS
        p_next, next_length, next_first = p_row, length, row
        if queries.eps is None:
            p_next, next_length, next_first = _first_block(items, following, o_key, RAGGED)
        for start in range(0, gl.maximum(length, 1), BLOCK_N):
            column = start + BLOCK_N + o_key
            next_row = gl.load(p_row + column, mask=column < length, other=-1)
            live = (row >= 0) & (row < workspace_rows) & (start + o_key < length)
            known = gl.where(live, row, 0)
            if p_more is None:
                p_keys = p_kv + (gl.expand_dims(known.to(gl.int64) * kv_stride, 1) + o_dim)
            else:
                place = gl.where(known < first_rows, known, known - first_rows).to(gl.int64) * kv_stride
                p_rows = gl.where(gl.expand_dims(known < first_rows, 1), p_kv, p_more)
                p_keys = p_rows + (gl.expand_dims(place, 1) + o_dim)
            m_key, _ = gl.broadcast(gl.expand_dims(live, 1), p_keys)
            live = live.to(gl.int32)
            least = gl.min(live, 0)
            buffer = number % BUFFERS
            phase = ((number // BUFFERS) & 1) ^ 1
            mbarrier.wait(ring.left_free.index(buffer), phase)
            ring.lives.index(buffer).store(live)
            ring.full.index(buffer).store(gl.full([1], least, gl.int32, ONE))
            for part in gl.static_range(HALF // SLICE):
                tile = ring.left.index(buffer).slice(part * SLICE, SLICE, 1)
                copy_elements(tile, p_keys + part * SLICE, mask=m_key)
            async_copy.mbarrier_arrive(ring.left_ready.index(buffer), increment_count=False)
            thread_barrier()
            mbarrier.arrive(ring.left_ready.index(buffer), count=1)
            mbarrier.wait(ring.right_free.index(buffer), phase)
            for part in gl.static_range(HALF // SLICE):
                tile = ring.right.index(buffer).slice(part * SLICE, SLICE, 1)
                copy_elements(tile, p_keys + (HALF + part * SLICE), mask=m_key)
            async_copy.mbarrier_arrive(ring.right_ready.index(buffer), increment_count=False)
            if queries.eps is not None and start == 0:
                now = opaque(item)
                norm_in_shared_memory(queries, q_phase, now // HEAD_BLOCKS, EPILOGUE.rope, SCORES)
                mbarrier.arrive(queries.normed, count=1)
                q_phase ^= 1
                # Not earlier: the norm leaves no registers for it.
                following = gl.minimum(now + items.programs, items.items - 1) // HEAD_BLOCKS
                p_next, next_length, next_first = _first_block(items, following, o_key, RAGGED)
            row = next_row
            number += 1
        p_row, length, row = p_next, next_length, next_first


@gluon.jit
def _head_rows(tile):
    """View a tile `[64, 256]` as TMA sees it: heads of one token."""
    return reinterpret(tile, gl.bfloat16, [1, BLOCK_H, HALF], HEAD_ROWS)


@gluon.jit
def _load_q(q, item, HEAD_BLOCKS: gl.constexpr):
    """Start the TMA copies of an item's queries. Heads past the last one are zero."""
    token = item // HEAD_BLOCKS
    head = item % HEAD_BLOCKS * BLOCK_H
    mbarrier.expect(q.ready, Q_BYTES)
    copy_tile(q.descriptor, [token, head, 0], q.ready, _head_rows(q.left))
    copy_tile(q.descriptor, [token, head, HALF], q.ready, _head_rows(q.right))


@gluon.jit
def _scores(q, ring, number):
    """Start the scores of block `number`; also return 0 if one of its keys is invalid."""
    buffer = number % BUFFERS
    mbarrier.wait(ring.left_ready.index(buffer), (number // BUFFERS) & 1)
    mbarrier.wait(ring.right_ready.index(buffer), (number // BUFFERS) & 1)
    # The copies wrote through the generic proxy, wgmma reads through the asynchronous one.
    fence_async_shared()
    scores = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q.left, ring.left.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q.right, ring.right.index(buffer).permute((1, 0)), scores, is_async=True)
    return scores, gl.min(ring.full.index(buffer).load(ONE), 0)


@gluon.jit
def _masked(scores, live, whole, scale, NORMED: gl.constexpr):
    """Set scores of invalid keys to -inf, and return them with the scale that is left to apply.

    Most blocks are `whole`, and unchanged. The scale of a NORMED head may be 0 or NaN, and -inf times it is NaN, so it
    is applied before.
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
    """Return `[64, 8]`: sums over the part of a row that a thread holds."""
    return gl.sum(gl.reshape(weights, [BLOCK_H, BLOCK_N // 8, 8]), 1)


@gluon.jit
def _softmax(scores, acc, top, sums, turn, scale, keys, shared, NORMED: gl.constexpr):
    """Compute the weights of a block, start the left half's GEMM with them, and store them for the right half.

    Multiply-adds are explicit, so that they are the same whatever is fused: RoPE turns contraction off.
    """
    # Scales are not negative, so that the largest score is scaled alone, and the others within the exponent.
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
    mbarrier.wait(shared.free.index(slot), ((turn // BUFFERS) & 1) ^ 1)
    shared.tile.index(slot).store(rounded)
    shared.factors.index(slot).store(rescale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(shared.ready.index(slot), count=1)
    by_sum = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout)), 1)
    return acc, operand, new_top, gl.fma(sums, by_sum, _lane_sums(weights))


@gluon.jit
def _store_half(acc, tile, out, item, FIRST: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Start the TMA store of dims FIRST to FIRST + 255 of an item's output through `tile`, keys that are done.

    TMA leaves out heads past the last one. No branch splits a warp: the GEMMs and copies that follow are instructions
    of whole warps.
    """
    tile.store(acc.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    store_tile(out, [item // HEAD_BLOCKS, item % HEAD_BLOCKS * BLOCK_H, FIRST], _head_rows(tile))


@gluon.jit
def _store_rows(acc, tile, results, item, p_cos, FIRST: gl.constexpr, H: gl.constexpr, EPILOGUE: gl.constexpr):
    """Store dims FIRST to FIRST + 255 of an item's output, rotated back if there is a `p_cos`, and quantised."""
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = gl.to_tensor(item // HEAD_BLOCKS).to(gl.int64)
    store_finished(acc, tile, results, token, item % HEAD_BLOCKS * BLOCK_H, p_cos, FIRST, H, EPILOGUE)


@gluon.jit
def _left(q, outputs, logits, items, ring, shared, H: gl.constexpr, RAGGED: gl.constexpr, EPILOGUE: gl.constexpr):
    """Run the first warpgroup: scores, softmax, the left half of the output.

    `outputs`: TMA descriptor of the output or None, and the results of `store_finished`.
    """
    out, results = outputs
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    NORMED: gl.constexpr = q.normed is not None
    o_row = gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    first = gl.program_id(0)
    number = 0  # of blocks so far
    turn = 0  # of the weights' buffers: one for each block, and one for the factor at the end of an item
    q_phase = 0
    _load_q(q, first, HEAD_BLOCKS)
    for item in range(first, items.items, items.programs):
        blocks = _block_count(items, item // HEAD_BLOCKS, RAGGED)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
        top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        sums = _lane_sums(gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES))
        mbarrier.wait(q.ready, q_phase)
        if NORMED:
            mbarrier.wait(q.normed, q_phase)
        by_head = q.scales.load(gl.SliceLayout(1, SCORES)) if NORMED else q.scale
        q_phase ^= 1
        scores, whole = _scores(q, ring, number)
        if out is not None:
            # While these scores run, the previous item's output leaves the keys that it used last.
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(ring.left_free.index((number + 1) % BUFFERS), count=1, pred=item != first)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for _ in range(blocks - 1):
            buffer = number % BUFFERS
            scores, rest = _masked(scores, ring.lives.index(buffer), whole, by_head, NORMED)
            keys = ring.left.index(buffer)
            acc, operand, top, sums = _softmax(scores, acc, top, sums, turn, rest, keys, shared, NORMED)
            scores, whole = _scores(q, ring, number + 1)
            acc, operand = warpgroup_mma_wait(2, deps=[acc, operand])
            thread_barrier()
            mbarrier.arrive(ring.left_free.index(buffer), count=1)
            # The first half of the scores is done: the right warpgroup may start its GEMM.
            operand = warpgroup_mma_wait(1, deps=[operand])
            mbarrier.arrive(shared.scores_done.index(buffer), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            number += 1
            turn += 1
        thread_barrier()
        if item + items.programs < items.items:
            _load_q(q, item + items.programs, HEAD_BLOCKS)
        buffer = number % BUFFERS
        scores, rest = _masked(scores, ring.lives.index(buffer), whole, by_head, NORMED)
        acc, operand, top, sums = _softmax(scores, acc, top, sums, turn, rest, ring.left.index(buffer), shared, NORMED)
        mbarrier.arrive(shared.scores_done.index(buffer), count=1)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        number += 1
        turn += 1
        head = item % HEAD_BLOCKS * BLOCK_H
        m_head = head + o_row < H
        shift = gl.where(top == float("-inf"), 0.0, top)
        sum_all = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
        denominator = sum_all
        if logits.p_sink is not None:
            sink = gl.load(logits.p_sink + head + o_row, mask=m_head, other=0.0)
            denominator += gl.exp2(gl.fma(sink, LOG2_E, shift * -1.0))
        factor = gl.where(sum_all == 0, 0.0, 1.0 / denominator)
        slot = turn % BUFFERS
        mbarrier.wait(shared.free.index(slot), ((turn // BUFFERS) & 1) ^ 1)
        shared.factors.index(slot).store(factor)
        thread_barrier()
        mbarrier.arrive(shared.ready.index(slot), count=1)
        turn += 1
        acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), 1)
        if out is not None:
            _store_half(acc, ring.left.index(buffer), out, item, 0, HEAD_BLOCKS)
        result = gl.to_tensor(item // HEAD_BLOCKS).to(gl.int64) * H + head
        if logits.p_lse is not None:
            lse = gl.where(sum_all == 0, float("inf"), (shift + gl.log2(sum_all)) * LN_2)
            gl.store(logits.p_lse + result + o_row, lse, mask=m_head)
        if logits.p_max is not None:
            gl.store(logits.p_max + result + o_row, top * LN_2, mask=m_head)
        if out is None:
            _store_rows(acc, ring.left.index(buffer), results, item, None, 0, H, EPILOGUE)
            mbarrier.arrive(ring.left_free.index(buffer), count=1)
    if out is not None:
        tma.store_wait(0)


@gluon.jit
def _right(outputs, table, items, ring, shared, H: gl.constexpr, RAGGED: gl.constexpr, EPILOGUE: gl.constexpr):
    """Run the second warpgroup: the right half of the output. `ring`: right halves of keys and their barriers."""
    out, results = outputs
    keys, keys_ready, keys_free = ring
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    first = gl.program_id(0)
    number = 0
    turn = 0
    for item in range(first, items.items, items.programs):
        blocks = _block_count(items, item // HEAD_BLOCKS, RAGGED)
        if EPILOGUE.inverse:
            row = table_row(table, item // HEAD_BLOCKS)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
        for block in range(blocks):
            buffer, slot = number % BUFFERS, turn % BUFFERS
            mbarrier.wait(keys_ready.index(buffer), (number // BUFFERS) & 1)
            mbarrier.wait(shared.ready.index(slot), (turn // BUFFERS) & 1)
            fence_async_shared()
            acc = acc * gl.expand_dims(shared.factors.index(slot).load(gl.SliceLayout(1, OUTPUT)), 1)
            mbarrier.wait(shared.scores_done.index(buffer), (number // BUFFERS) & 1)
            acc = warpgroup_mma(shared.tile.index(slot), keys.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
            mbarrier.arrive(shared.free.index(slot), count=1)
            mbarrier.arrive(keys_free.index(buffer), count=1, pred=block + 1 < blocks)
            number += 1
            turn += 1
        slot = turn % BUFFERS
        mbarrier.wait(shared.ready.index(slot), (turn // BUFFERS) & 1)
        factor = shared.factors.index(slot).load(gl.SliceLayout(1, OUTPUT))
        thread_barrier()
        mbarrier.arrive(shared.free.index(slot), count=1)
        turn += 1
        # The output takes the place of the keys that the item used last.
        buffer = (number + 1) % BUFFERS
        acc = acc * gl.expand_dims(factor, 1)
        p_cos = cosines_of(table, row) if EPILOGUE.inverse else None
        if out is not None:
            _store_half(acc, keys.index(buffer), out, item, HALF, HEAD_BLOCKS)
            tma.store_wait(0)
            thread_barrier()
        else:
            _store_rows(acc, keys.index(buffer), results, item, p_cos, HALF, H, EPILOGUE)
        mbarrier.arrive(keys_free.index(buffer), count=1)


@gluon.jit(
    do_not_specialize=["items", "width", "total", "first_rows", "workspace_rows", "tokens", "padded_tokens", "max_pos"],
    do_not_specialize_on_alignment=["p_bounds", "p_positions"],
)
def sparse_mla_prefill_sm90_kernel(
    queries,  # TMA descriptor of [T, H, 512] bfloat16 in blocks of [1, 64, 256]
    out,  # the same, or None where rows are rotated back or quantised
    p_out,  # then [T, H, 512] bfloat16 or e4m3 [groups, T, K], contiguous
    p_scale,  # of e4m3, see HeadRows
    p_max,  # [T, H] float32, contiguous, or None
    p_lse,  # [T, H] float32, contiguous, or None
    p_kv,  # [first_rows, 512] bfloat16
    p_more,  # [workspace_rows - first_rows, 512] bfloat16, or None
    p_indices,  # [T, width] int, or [total] int
    p_bounds,  # [T] int or None, or [T + 1] int
    p_sink,  # [H] float32 or None, contiguous
    p_positions,  # [T] int or None
    p_table,  # [max_pos, rope] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the query norm, None for queries that are normed and rotated
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
    first_rows,
    workspace_rows,
    RAGGED: gl.constexpr,
    H: gl.constexpr,
    EPILOGUE: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
    GATHERER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend every num_programs-th item from item p on; item i is head block i % HEAD_BLOCKS of a token."""
    if eps is None:
        # Two tiles: views of one tile have separate addresses, and are slower.
        q_left = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, HALF], SWIZZLED)
        q_right = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, HALF], SWIZZLED)
        q_tile = q_left  # not normed
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
    # Two of them: with one, the left warpgroup could arrive twice before the right one waits, which would then hang.
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
    items = Items(p_indices, p_bounds, index_stride, bound_stride, width, total, items, gl.num_programs(0))
    ring = KeyRing(k_left, k_right, lives, full, left_ready, right_ready, left_free, right_free)
    shared = Weights(weights_tile, factors, weights_ready, weights_free, scores_done)
    table = AngleTable(p_positions, position_stride, p_table, table_stride, max_pos)
    outputs = out, (p_out, p_scale, tokens, padded_tokens)
    logits = LeftResults(p_sink, p_max, p_lse)
    normed = None if eps is None else q_normed
    q = LeftQueries(queries, q_left, q_right, q_ready, normed, scales, scale)
    shared_queries = SharedQueries(q_tile, q_ready, q_normed, scales, table, scale, eps)
    workspace = p_kv, p_more, kv_stride, first_rows, workspace_rows
    gl.warp_specialize([
        (_left, (q, outputs, logits, items, ring, shared, H, RAGGED, EPILOGUE)),
        (_right, (outputs, table, items, (k_right, right_ready, right_free), shared, H, RAGGED, EPILOGUE)),
        (_gatherer, (workspace, items, ring, shared_queries, H, RAGGED, EPILOGUE)),
    ], [4, 4], [RIGHT_REGISTERS, GATHERER_REGISTERS])  # fmt: skip


HEADS = 64
RIGHT_REGISTERS, GATHERER_REGISTERS = 168, 80
FUSED_RIGHT_REGISTERS = 176
"""Registers of a thread of the right warpgroup with fused parts; the left one then has 8 fewer."""
ROW_ALIGN = 16
"""Alignment of copies in bytes; and of row strides in elements, because Triton specialises strides as they are."""
MAX_ROPE, STRIDE_LIMIT = 64, 2**31
_HEAD_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def why_unsupported(call: PrefillCall, fused: FusedParts = NOT_FUSED) -> str:
    """Return why this kernel does not support a call with these fused parts, "" if it does."""
    q, kv, more, dims = call.q, call.kv, call.more, layout.HEAD_DIM
    _, heads, head_dim = q.shape
    if q.dtype is not torch.bfloat16 or kv.dtype is not torch.bfloat16 or head_dim != dims or heads == 0:
        return f"it takes bfloat16 vectors of {dims} dims, these are {q.dtype} and {kv.dtype} of {head_dim}"
    if kv.shape[0] == 0:
        return "it takes a workspace that has rows"
    tensors = {"q": q, "kv": kv, "indices": call.rows.indices, "attn_sink": call.sink}
    for name, x in (tensors | {"cos_sin_cache": fused.cos_sin_cache}).items():
        if x is not None and x.stride(-1) != 1:
            return f"the last dim of {name} is contiguous, this one has stride {x.stride(-1)}"
    if any(x.stride(0) % ROW_ALIGN or x.data_ptr() % ROW_ALIGN for x in (kv, more) if x is not None):
        return f"rows of the workspace are a multiple of {ROW_ALIGN} elements apart, these are {kv.stride(0)}"
    if more is not None and (more.dtype is not kv.dtype or more.stride() != kv.stride()):
        return f"all rows are {kv.dtype} of strides {kv.stride()}, the later ones {more.dtype} of {more.stride()}"
    strides = _strides(q)
    if min(strides) < head_dim or any(n % ROW_ALIGN for n in (q.data_ptr(), *(q.element_size() * n for n in strides))):
        return f"queries do not overlap and start at multiples of {ROW_ALIGN} bytes, these have strides {strides}"
    if not call.scale > 0:
        return f"the scale is positive, this one is {call.scale}"
    table = fused.cos_sin_cache
    if table is not None and (table.shape[1] > MAX_ROPE or table.stride(0) >= STRIDE_LIMIT):
        at = f"this one has {table.shape[1]}, {table.stride(0)} elements apart"
        return f"the RoPE table has at most {MAX_ROPE} columns, {at}"
    return ""


def _strides(heads: Tensor) -> list[int]:
    """Return the strides of tokens and of heads. The stride of a dim of size 1 may be anything, and is replaced."""
    return [n if size > 1 else layout.HEAD_DIM for n, size in zip(heads.stride(), heads.shape[:2], strict=False)]


def _descriptor(heads: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of `[T, H, 512]` in tiles of 64 heads and 256 dims."""
    return TensorDescriptor(
        heads, list(heads.shape), [*_strides(heads), 1], [1, HEADS, layout.HEAD_DIM // 2], _HEAD_ROWS
    )


def launch(call: PrefillCall, gpu: Gpu) -> tuple[Tensor, Tensor, Tensor]:
    """Run `call` on `gpu`; return `out`, `max_logits` and `lse`."""
    out, max_logits, lse = new_outputs(call.q)
    _launch(Outputs(out, lse), max_logits, call, gpu, NOT_FUSED)
    return out, max_logits, lse


def launch_fused(call: PrefillCall, gpu: Gpu, fused: FusedParts) -> tuple[Tensor, Tensor]:
    """Run `call` on `gpu` with fused parts; return `out` and `lse`, or values and scales, as the decode ops do."""
    into = outputs_for(call.q, fused)
    _launch(into, None, call, gpu, fused)
    return into.pair()


def _launch(into: Outputs, max_logits: Tensor | None, call: PrefillCall, gpu: Gpu, fused: FusedParts) -> None:
    """Run `call` into outputs that are contiguous, except for those that TMA stores."""
    q, kv, more, rows = call.q, call.kv, call.more, call.rows
    tokens, heads, _ = q.shape
    if tokens * heads == 0:
        return
    by_tma = not fused.inverse_rope and fused.n_groups == 0
    if by_tma and fused.q_norm_eps is None:
        fused = NOT_FUSED  # an unused table is no reason to compile again
    positions, position_stride, table, table_strides, max_pos = fused.rope()
    items = tokens * layout.cdiv(heads, HEADS)
    launch_kernel(
        sparse_mla_prefill_sm90_kernel,
        (min(items, gpu.sms),),
        _descriptor(q),
        _descriptor(into.out) if by_tma else None,
        None if by_tma else into.out,
        into.scale,
        max_logits,
        into.lse,
        kv,
        more,
        rows.indices,
        rows.bounds,
        call.sink,
        positions,
        table,
        call.scale * _LOG2_E.value,
        fused.q_norm_eps,
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
        kv.shape[0] + (0 if more is None else more.shape[0]),
        RAGGED=rows.ragged,
        H=heads,
        EPILOGUE=fused.epilogue(),
        RIGHT_REGISTERS=RIGHT_REGISTERS if fused is NOT_FUSED else FUSED_RIGHT_REGISTERS,
        GATHERER_REGISTERS=GATHERER_REGISTERS,
        num_warps=4,
        # A contracted multiply and add rounds once where the separate ops round twice.
        enable_fp_fusion=False,
    )
