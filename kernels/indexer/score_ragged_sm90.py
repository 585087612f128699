"""Scores of gathered e4m3 keys for blocks of queries on Hopper, in Gluon: indexer_score_ragged.py otherwise.

A warpgroup keeps a tile of keys as float16 in shared memory. The queries of one head after another are copied into a
ring of buffers, several heads ahead; from there they go through registers into the matrix unit, as the keys do in
indexer_score_hopper.py. Two programs share a multiprocessor: while one sums up in float32, the other multiplies.

On an H200 the last 256, 1,024 and 4,096 tokens of a prompt with 4,096 entries take 45, 140 and 484 us, where the kernel
for any GPU takes 64, 219 and 754; with the selection they take 54, 166 and 559 (`dsv4 bench prefill`;
examples/results/prefill_selection_h200_2026-11-20.json). Tried without gain, with times of 1,024 and 4,096 tokens:
tiles of 64 keys, 169 and 567, or with 168 registers, so that three programs share a multiprocessor, 164 and 533;
copies started behind the products, 139 and 483; five stages, 136 and 482; a warpgroup that makes queries float16 for
two others, each of which has 128 keys and the products of two heads in flight, 129 and 479, but 65 for 256 tokens.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_elements
from ..host.launch import launch_kernel
from .score_sm90 import ALIGN, COPIES, KEYS, PROPAGATE_NAN, SWIZZLED, D, operand, order_key, queries_refused

QUERIES, ENTRIES = 64, 128
STAGES = 4

BLOCK = gl.constexpr(QUERIES)
RING = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _fetch(queries, p_tile, head, heads, head_stride, m_token):
    """Start the copy of a head's queries, if there is such a head. Tokens that are none have zeros."""
    copy_elements(queries, p_tile + head * head_stride.to(gl.int64), mask=m_token & (head < heads))
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["tokens", "rows", "topk"], do_not_specialize_on_alignment=["p_lens", "p_starts", "p_ends"]
)
def indexer_score_ragged_hopper_kernel(
    p_out,  # [T, >= rows] float32 logits, or int32 order keys with ORDER; contiguous columns
    p_lens,  # [T] int32, contiguous: how many rows a token sees
    p_q,  # [T, H, 128] bytes of e4m3, contiguous dims
    p_weights,  # [T, H] float32
    p_k,  # [rows, 128] bytes of e4m3, contiguous
    p_k_scale,  # [rows] float32, contiguous
    p_starts,  # [T] int
    p_ends,  # [T] int
    out_stride,
    q_token_stride,
    q_head_stride,
    weight_token_stride,
    weight_head_stride,
    start_stride,
    end_stride,
    tokens,
    rows,
    topk,
    ORDER: gl.constexpr,
    HEADS: gl.constexpr,
    PADDED_HEADS: gl.constexpr,
    ENTRIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Program (p, s) of (P, S) takes tokens p * BLOCK and on, and every S-th tile of keys that any of them sees.

    A block of tokens that see up to topk rows each is not scored for order keys: all of its rows are selected.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ENTRIES, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(1, ACC)
    first_token = gl.program_id(0) * BLOCK
    token = (first_token + gl.arange(0, BLOCK, TOKEN)).to(gl.int64)
    live = token < tokens
    start = gl.load(p_starts + token * start_stride, mask=live, other=-1).to(gl.int64)
    end = gl.load(p_ends + token * end_stride, mask=live, other=0).to(gl.int64)
    # From here on within the rows, which int32 can count.
    length = gl.where(start >= 0, gl.maximum(gl.minimum(end, rows) - start, 0), 0).to(gl.int32)
    start = gl.where(length > 0, start, 0).to(gl.int32)
    part = gl.program_id(1)
    gl.store(p_lens + token, length, mask=live & (part == 0))
    first = gl.min(gl.where(length > 0, start, rows), 0)
    last = gl.max(start + length, 0)
    scored = gl.max(length, 0) > topk
    if not ORDER:
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
        p_weight = p_weights + w_token * weight_token_stride + o_head * weight_head_stride
        m_weight, p_weight = gl.broadcast((w_token < tokens) & (o_head < HEADS), p_weight)
        for_heads = gl.load(p_weight, mask=m_weight, other=0.0)
        reinterpret(weights, gl.float32, [PADDED_HEADS, BLOCK], PLAIN).store(for_heads)
    o_row = first_token + gl.arange(0, BLOCK, gl.SliceLayout(1, COPIES))
    o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    m_token = gl.expand_dims(o_row < tokens, 1)
    p_tile = p_q + gl.expand_dims(gl.where(o_row < tokens, o_row, 0).to(gl.int64) * q_token_stride, 1) + o_dim
    m_token, p_tile = gl.broadcast(m_token, p_tile)
    zero = gl.zeros([BLOCK, ENTRIES], gl.float32, ACC)
    for begin in range(begin_first, last, step):
        logit = gl.zeros([BLOCK, ENTRIES], gl.float32, ACC)
        if scored:
            # All have read the keys and queries of the tile before.
            thread_barrier()
            for early in gl.static_range(STAGES - 1):
                _fetch(ring.index(early), p_tile, early, HEADS, q_head_stride, m_token)
            o_entry = (begin + gl.arange(0, ENTRIES, gl.SliceLayout(1, COPIES))).to(gl.int64)
            p_keys = p_k + gl.expand_dims(o_entry * D, 1) + o_dim
            m_key, p_keys = gl.broadcast(gl.expand_dims(o_entry < rows, 1), p_keys)
            keys.store(operand(gl.load(p_keys, mask=m_key, other=0)))
            fence_async_shared()
            thread_barrier()
            for head in range(HEADS):
                async_copy.wait_group(STAGES - 2)
                ahead = head + STAGES - 1
                _fetch(ring.index(ahead % STAGES), p_tile, ahead, HEADS, q_head_stride, m_token)
                queries = operand(ring.index(head % STAGES).load(KEYS))
                queries = gl.convert_layout(queries, gl.DotOperandLayout(0, ACC, 2))
                weight = gl.expand_dims(weights.index(head).load(TOKEN), 1)
                dots = warpgroup_mma(queries, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
                dots = warpgroup_mma_wait(0, deps=[dots])
                logit += gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN) * weight
            async_copy.wait_group(0)
            scale = gl.load(p_k_scale + (begin + o_key), mask=begin + o_key < rows, other=0.0)
            logit = logit * gl.expand_dims(scale, 0)
        column = gl.expand_dims(begin + o_key, 0) - gl.expand_dims(start, 1)
        seen = (column >= 0) & (column < gl.expand_dims(length, 1))
        p_column = (p_out + gl.expand_dims(token * out_stride, 1)) + column
        if ORDER:
            gl.store(p_column, order_key(logit), mask=seen)
        else:
            gl.store(p_column, logit, mask=seen)


def refuses(q: Tensor, k: Tensor, k_scale: Tensor, cache_format: str) -> str:
    """Why these queries and keys cannot be scored by this kernel, "" if they can."""
    if cache_format != "indexer_fp8":
        return "it takes indexer_fp8"
    gaps = not (k.is_contiguous() and k_scale.is_contiguous())
    if gaps or k.storage_offset() % ALIGN or k_scale.storage_offset() % layout.INDEXER_FP8.scale:
        return "it takes keys and scales without gaps"
    return queries_refused(q)


def score(
    out: Tensor, lens: Tensor, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor, row_starts: Tensor,
    row_ends: Tensor, topk: int, splits: int, entries: int = ENTRIES, stages: int = STAGES,
) -> None:  # fmt: skip
    """As `score_rows` of indexer_logits_topk_ragged.py; `q` is bytes."""
    heads = q.shape[1]
    launch_kernel(
        indexer_score_ragged_hopper_kernel,
        (layout.cdiv(q.shape[0], QUERIES), splits),
        out, lens, q, weights, k, k_scale.view(torch.float32), row_starts, row_ends,
        out.stride(0), *q.stride()[:2], *weights.stride(), row_starts.stride(0), row_ends.stride(0),
        q.shape[0], k.shape[0], topk,
        ORDER=not out.is_floating_point(), HEADS=heads, PADDED_HEADS=triton.next_power_of_2(heads), ENTRIES=entries,
        STAGES=stages,
    )  # fmt: skip
