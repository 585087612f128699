"""Scores of gathered e4m3 keys for blocks of queries on sm_90, in Gluon.

A warpgroup keeps a tile of keys as float16 in shared memory. Queries are copied head by head into a ring of buffers,
several heads ahead, and go from there through registers into the tensor core, with the permutation of dims of
score_sm90.py. Two CTAs share an SM: while one sums in float32, the other multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_elements
from ..host.addresses import first_byte
from ..host.launch import launch_kernel
from .score_sm90 import ALIGN, COPIES, KEYS, PROPAGATE_NAN, SWIZZLED, D, operand, order_key, why_unsupported_queries
from .score_triton import RaggedScoreCall

QUERIES, ENTRIES = 64, 128
STAGES = 4

BLOCK = gl.constexpr(QUERIES)
RING = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


class Shape(NamedTuple):
    """Compile-time sizes of a launch: what is written, heads, and them padded, keys of a tile, buffers of the ring."""

    order_keys: bool
    heads: int
    padded_heads: int
    entries: int
    stages: int


class Strides(NamedTuple):
    """Strides of the kernel's arguments; `tokens` are those of starts and ends."""

    out: int
    q: tuple[int, ...]
    weights: tuple[int, ...]
    tokens: tuple[int, ...]


@gluon.jit
def _copy_queries(queries, p_tile, head, heads, head_stride, m_token):
    """Start the copy of a head's queries, if there is such a head. Tokens past the last have zeros."""
    copy_elements(queries, p_tile + head * head_stride.to(gl.int64), mask=m_token & (head < heads))
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["tokens", "rows", "topk"], do_not_specialize_on_alignment=["p_lens", "p_starts", "p_ends"]
)
def indexer_score_ragged_sm90_kernel(
    p_out,  # [T, >= rows] float32 logits, or int32 order keys; contiguous columns
    p_lens,  # [T] int32, contiguous: number of rows that a token sees
    queries,  # bytes of e4m3 [T, H, 128], contiguous dims, and weights float32 [T, H]
    gathered,  # bytes of e4m3 [rows, 128] and scales float32 [rows], contiguous
    p_starts,  # [T] int
    p_ends,  # [T] int
    strides,
    tokens,
    rows,
    topk,
    SHAPE: gl.constexpr,
):
    """Score, for a block of tokens, every S-th tile of keys that any of them sees, in program (p, s) of (P, S).

    A block of tokens that see up to topk rows each is not scored for order keys: all of its rows are selected.
    """
    p_q, p_weights = queries
    p_k, p_k_scale = gathered
    HEADS: gl.constexpr = SHAPE.heads
    PADDED_HEADS: gl.constexpr = SHAPE.padded_heads
    ENTRIES: gl.constexpr = SHAPE.entries
    STAGES: gl.constexpr = SHAPE.stages
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ENTRIES, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(1, ACC)
    first_token = gl.program_id(0) * BLOCK
    token = (first_token + gl.arange(0, BLOCK, TOKEN)).to(gl.int64)
    live = token < tokens
    start = gl.load(p_starts + token * strides.tokens[0], mask=live, other=-1).to(gl.int64)
    end = gl.load(p_ends + token * strides.tokens[1], mask=live, other=0).to(gl.int64)
    # Within the rows from here on, so int32 holds them.
    length = gl.where(start >= 0, gl.maximum(gl.minimum(end, rows) - start, 0), 0).to(gl.int32)
    start = gl.where(length > 0, start, 0).to(gl.int32)
    part = gl.program_id(1)
    gl.store(p_lens + token, length, mask=live & (part == 0))
    first = gl.min(gl.where(length > 0, start, rows), 0)
    last = gl.max(start + length, 0)
    scored = gl.max(length, 0) > topk
    if not SHAPE.order_keys:
        scored = True
    step = gl.num_programs(1) * ENTRIES
    begin_first = first + part * ENTRIES
    o_key = gl.arange(0, ENTRIES, gl.SliceLayout(0, ACC))
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, D], RING)
    keys = gl.allocate_shared_memory(gl.float16, [ENTRIES, D], SWIZZLED)
    weights = gl.allocate_shared_memory(gl.float32, [PADDED_HEADS, BLOCK], FLAT)
    if scored and begin_first < last:
        o_head = gl.expand_dims(gl.arange(0, PADDED_HEADS, gl.SliceLayout(1, WEIGHTS)).to(gl.int64), 1)
        w_token = gl.expand_dims((first_token + gl.arange(0, BLOCK, gl.SliceLayout(0, WEIGHTS))).to(gl.int64), 0)
        p_weight = p_weights + w_token * strides.weights[0] + o_head * strides.weights[1]
        m_weight, p_weight = gl.broadcast((w_token < tokens) & (o_head < HEADS), p_weight)
        for_heads = gl.load(p_weight, mask=m_weight, other=0.0)
        reinterpret(weights, gl.float32, [PADDED_HEADS, BLOCK], PLAIN).store(for_heads)
    o_row = first_token + gl.arange(0, BLOCK, gl.SliceLayout(1, COPIES))
    o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    m_token = gl.expand_dims(o_row < tokens, 1)
    p_tile = p_q + gl.expand_dims(gl.where(o_row < tokens, o_row, 0).to(gl.int64) * strides.q[0], 1) + o_dim
    m_token, p_tile = gl.broadcast(m_token, p_tile)
    zero = gl.zeros([BLOCK, ENTRIES], gl.float32, ACC)
    for begin in range(begin_first, last, step):
        logit = gl.zeros([BLOCK, ENTRIES], gl.float32, ACC)
        if scored:
            # Wait until all threads have read the keys and queries of the previous tile.
            thread_barrier()
            for ahead in gl.static_range(STAGES - 1):
                _copy_queries(ring.index(ahead), p_tile, ahead, HEADS, strides.q[1], m_token)
            o_entry = (begin + gl.arange(0, ENTRIES, gl.SliceLayout(1, COPIES))).to(gl.int64)
            p_keys = p_k + gl.expand_dims(o_entry * D, 1) + o_dim
            m_key, p_keys = gl.broadcast(gl.expand_dims(o_entry < rows, 1), p_keys)
            keys.store(operand(gl.load(p_keys, mask=m_key, other=0)))
            fence_async_shared()
            thread_barrier()
            for head in range(HEADS):
                async_copy.wait_group(STAGES - 2)
                following = head + STAGES - 1
                _copy_queries(ring.index(following % STAGES), p_tile, following, HEADS, strides.q[1], m_token)
                q = operand(ring.index(head % STAGES).load(KEYS))
                q = gl.convert_layout(q, gl.DotOperandLayout(0, ACC, 2))
                weight = gl.expand_dims(weights.index(head).load(TOKEN), 1)
                dots = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
                dots = warpgroup_mma_wait(0, deps=[dots])
                logit += gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN) * weight
            async_copy.wait_group(0)
            scale = gl.load(p_k_scale + (begin + o_key), mask=begin + o_key < rows, other=0.0)
            logit = logit * gl.expand_dims(scale, 0)
        column = gl.expand_dims(begin + o_key, 0) - gl.expand_dims(start, 1)
        seen = (column >= 0) & (column < gl.expand_dims(length, 1))
        p_column = (p_out + gl.expand_dims(token * strides.out, 1)) + column
        if SHAPE.order_keys:
            gl.store(p_column, order_key(logit), mask=seen)
        else:
            gl.store(p_column, logit, mask=seen)


def why_unsupported(call: RaggedScoreCall) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    k, k_scale, cache_format = call.op.k, call.op.k_scale, call.op.cache_format
    if cache_format != "indexer_fp8":
        return f"it scores indexer_fp8, this is {cache_format}"
    if not (k.is_contiguous() and k_scale.is_contiguous()):
        return f"keys and scales are contiguous, these have strides {k.stride()} and {k_scale.stride()}"
    size = layout.INDEXER_FP8.scale
    if first_byte(k) % ALIGN or first_byte(k_scale) % size:
        at = f"these start at bytes {first_byte(k)} and {first_byte(k_scale)}"
        return f"keys start at a multiple of {ALIGN} bytes and scales at one of {size}, {at}"
    return why_unsupported_queries(call.op.q)


def score(call: RaggedScoreCall, splits: int, entries: int = ENTRIES, stages: int = STAGES) -> None:
    """Launch the kernel; the keys of a block of tokens are split among `splits` programs."""
    op, out = call.op, call.out
    tokens, heads = op.q.shape[:2]
    launch_kernel(
        indexer_score_ragged_sm90_kernel,
        (layout.cdiv(tokens, QUERIES), splits),
        out,
        call.lens,
        (op.q.view(torch.uint8), op.weights),
        (op.k, op.k_scale.view(torch.float32)),
        op.row_starts,
        op.row_ends,
        Strides(
            out.stride(0), op.q.stride()[:2], op.weights.stride(), (op.row_starts.stride(0), op.row_ends.stride(0))
        ),
        tokens,
        op.k.shape[0],
        call.topk,
        SHAPE=Shape(call.order_keys, heads, triton.next_power_of_2(heads), entries, stages),
    )
