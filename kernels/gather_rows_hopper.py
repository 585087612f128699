"""Device functions of a Hopper warpgroup that gathers rows of a workspace into tiles of keys in shared memory.

Rows go there 16 bytes at a time without passing through registers, in the 128-byte swizzle that the matrix unit reads.
A block of keys has two halves with barriers of their own, so that work can begin on the first. Behind the first block
of an item it norms and turns the item's queries, if it is asked to.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .. import layout
from .attention_rows_hopper import here
from .barriers_hopper import thread_barrier
from .copies_hopper import copy_elements
from .queries_hopper import norm_in_place

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
