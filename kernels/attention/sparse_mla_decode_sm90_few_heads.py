"""Sparse MLA decode of few heads on sm_90, in Gluon: bfloat16 queries, blocks of 8 to 32 heads.

GEMMs of few heads are cheap, and keys cost what they cost for many heads. So one of three warpgroups attends:

    consumer  scores of 64 keys, online softmax, weights to shared memory, all dims of the output
    producer  two warpgroups: gathers 64 `fp8_ds_mla` keys into registers, dequantises them exactly, stores them
              swizzled; or copies PLAIN rows, which are bfloat16

Keys are the rows of both GEMMs and heads their columns, so that no head is padded to 64. Between the two are two or
three buffers of 64 keys. A program takes a block of heads of one token and its split of the token's keys, window cache
first. The consumer waits for both GEMMs in each iteration: one that ran on into the next would serialise all of them,
or double the code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..host.gpu import Gpu
from .common import CHANGING, DecodeCall, Outputs
from .kv_load_sm90 import (
    SWIZZLED_WORDS,
    KeyRow,
    address_of,
    announce_copies,
    copy_rows,
    dequantize_keys,
    fetch_keys,
    row_length,
)
from .prologue_epilogue_sm90 import (
    SWIZZLED,
    D,
    HeadRows,
    Queries,
    angle_pointer,
    fetch_angles,
    fetch_queries,
    norm_queries,
    query_layout,
    rotated_width,
    split_range,
    store_few_rows,
)
from .sparse_mla_decode_sm90 import MIN_HEADS, Variant, launch_variant, why_unsupported_sm90
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

KEYS = 64
MAX_HEADS = MIN_HEADS - 1
MIN_BLOCK_H = 8

BLOCK_N = gl.constexpr(KEYS)
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)
KEY_WORDS = gl.constexpr(layout.HEAD_DIM // 2)
HEAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# As in kv_load_sm90.py, for twice as many warps.
_WORDS = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [8, 1, 1], [2, 1, 0])
WORDS = gl.constexpr(_WORDS)
SLOTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _WORDS)))
ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
_COPIES = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
COPIES = gl.constexpr(_COPIES)
COPIED = gl.constexpr(gl.SliceLayout(1, _COPIES))
COPY_ARRIVALS = gl.constexpr(256 + 1)  # one per thread of two warpgroups, and one for their stores


class KeyRing(NamedTuple):
    """Buffers of keys bfloat16 `[BUFFERS, 64, 512]`, shared, with flags of valid keys and barriers."""

    keys: Any
    lives: Any
    ready: Any
    free: Any


@gluon.jit
def _row_of(window, extra, window_blocks, block):
    """Return the `KeyRow` that `block` belongs to, and the block's first column there."""
    first = block < window_blocks
    p_words = gl.where(first, window.p_words, extra.p_words)
    chunks = gl.where(first, window.page_chunks, extra.page_chunks)
    p_row = gl.where(first, window.p_row, extra.p_row)
    length = gl.where(first, window.length, extra.length)
    capacity = gl.where(first, window.capacity, extra.capacity)
    log_page = gl.where(first, window.log_page, extra.log_page)
    row = KeyRow(p_words, chunks, p_row, length, capacity, log_page)
    return row, (block - gl.where(first, 0, window_blocks)) * BLOCK_N


@gluon.jit
def _slots(window, extra, window_blocks, block, end, SLOTS: gl.constexpr = SLOTS):
    """Load int32 slots of a block; -1 for invalid slots, and from block `end` on."""
    # Blocks past the last one read its cache: the other cache may have no pages.
    row, column = _row_of(window, extra, window_blocks, gl.minimum(block, end - 1))
    o_column = column + gl.arange(0, BLOCK_N, SLOTS)
    slot = gl.load(row.p_row + o_column, mask=o_column < gl.where(block < end, row.length, 0), other=-1)
    return gl.where((slot >= 0) & (slot < row.capacity), slot, -1).to(gl.int32)


@gluon.jit
def _fetch(window, extra, window_blocks, block, end, slot):
    """Load the keys `slot` of a block from its cache, or from the cache that `_slots` read instead."""
    row, _ = _row_of(window, extra, window_blocks, gl.minimum(block, end - 1))
    return fetch_keys(row.p_words, row.page_chunks, slot, row.log_page, WORDS, ROPES)


@gluon.jit
def _producer(window, extra, window_blocks, begin, end, ring):
    """Run the second and the third warpgroup: they load the keys of blocks `begin` to `end`."""
    keys, lives, ready, free = ring
    BUFFERS: gl.constexpr = keys.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, KEY_WORDS], SWIZZLED_WORDS)
    if end > begin:
        slot = _slots(window, extra, window_blocks, begin, end)
        next_slot = _slots(window, extra, window_blocks, begin + 1, end)
        codes, rope, scales = _fetch(window, extra, window_blocks, begin, end, slot)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            now_codes, now_rope, now_scales, now_slot = codes, rope, scales, slot
            slot = next_slot
            # The loads of the next keys are in flight while these are dequantised.
            codes, rope, scales = _fetch(window, extra, window_blocks, block + 1, end, slot)
            next_slot = _slots(window, extra, window_blocks, block + 2, end)
            pairs = dequantize_keys(now_codes, now_rope, now_scales, now_slot >= 0, WORDS)
            mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
            words.index(buffer).store(pairs)
            lives.index(buffer).store(gl.where(now_slot >= 0, 1.0, 0.0))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)


@gluon.jit
def _copier(window, extra, window_blocks, begin, end, ring):
    """Run the second and the third warpgroup for PLAIN keys, as `_producer` does."""
    keys, lives, ready, free = ring
    BUFFERS: gl.constexpr = keys.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, KEY_WORDS], SWIZZLED_WORDS)
    if end > begin:
        slot = _slots(window, extra, window_blocks, begin, end, COPIED)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            now = slot
            slot = _slots(window, extra, window_blocks, block + 1, end, COPIED)
            source, _ = _row_of(window, extra, window_blocks, block)
            row, _ = address_of(now, source.page_chunks, source.log_page, True)
            mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
            lives.index(buffer).store(gl.where(now >= 0, 1.0, 0.0))
            copy_rows(words.index(buffer), source.p_words, row, now >= 0, COPIES)
            announce_copies(ready.index(buffer))


@gluon.jit
def _scores(keys, q_tile, MMA: gl.constexpr):
    """Start the scores of a block of keys, `[keys, heads]`."""
    N: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([BLOCK_N, N], gl.float32, MMA)
    return warpgroup_mma(keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, live, acc, top, sums, scale, weights_tile):
    """Store the weights of a block, and rescale the sums so far."""
    scores = gl.where(gl.expand_dims(live, 1) > 0, scores * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 0))
    # -inf - -inf is NaN: a head without keys so far is shifted by zero.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = gl.expand_dims(gl.exp2(top - shift), 0)
    weights = gl.exp2(scores - gl.expand_dims(shift, 0))
    weights_tile.store(weights.to(gl.bfloat16).permute((1, 0)))
    fence_async_shared()
    thread_barrier()
    return acc * rescale, new_top, sums * rescale + weights


@gluon.jit
def _consumer(
    queries, rows, scale, blocks, tiles, ring, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr, PLAIN: gl.constexpr
):
    """Run the first warpgroup: all but the keys. `tiles`: queries and weights in shared memory."""
    q_tile, weights_tile = tiles
    keys, lives, ready, free = ring
    heads = rows.heads
    N: gl.constexpr = q_tile.shape[0]  # heads
    BUFFERS: gl.constexpr = keys.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, MMA)
    LIVE: gl.constexpr = gl.SliceLayout(1, MMA)
    QUERIES: gl.constexpr = query_layout(N)
    q = fetch_queries(queries.p_q, queries.head_stride, heads, N, PARTIAL, QUERIES)
    if queries.eps is not None:
        # In flight together with the queries.
        angles = gl.zeros([N, rotated_width(N, EPILOGUE.rope)], gl.bfloat16, QUERIES)
        cos, sin = fetch_angles(queries.p_cos, angles, EPILOGUE.rope)
    q_tile.store(q)
    if queries.eps is not None:
        norm_queries(q_tile, cos, sin, queries.eps, EPILOGUE.rope)
    fence_async_shared()
    thread_barrier()
    acc = gl.zeros([D, N], gl.float32, MMA)
    sums = gl.zeros([BLOCK_N, N], gl.float32, MMA)
    top = gl.full([N], float("-inf"), gl.float32, HEADS)
    for number in range(blocks):
        buffer = number % BUFFERS
        mbarrier.wait(ready.index(buffer), (number // BUFFERS) & 1)
        if PLAIN:
            # Copies write through the generic proxy, wgmma reads through the asynchronous one.
            fence_async_shared()
        scores = _scores(keys.index(buffer), q_tile, MMA)
        live = lives.index(buffer).load(LIVE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, sums = _softmax(scores, live, acc, top, sums, scale, weights_tile)
        acc = warpgroup_mma(keys.index(buffer).permute((1, 0)), weights_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(free.index(buffer), count=1)
    # A head for each thread, which has several columns of the GEMMs.
    total = gl.convert_layout(gl.sum(sums, 0), HEAD)
    top = gl.convert_layout(top, HEAD)
    o_head = gl.arange(0, N, HEAD)
    shift = gl.where(top == float("-inf"), 0.0, top)
    lse = gl.where(total == 0, float("-inf"), shift + gl.log2(total))
    factor = gl.where(total == 0, 0.0, 1.0 / total)
    acc = acc * gl.expand_dims(gl.convert_layout(factor, HEADS), 0)
    if EPILOGUE.split:
        gl.store(rows.p_lse + o_head, lse, mask=o_head < heads)
        if blocks > 0:
            o_column = gl.expand_dims(gl.arange(0, N, HEADS), 0)
            o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, MMA)), 1)
            gl.store(rows.p_out + (o_column * D + o_dim), acc, mask=(o_column < heads) & (o_dim >= 0))
    else:
        if rows.p_lse is not None:
            gl.store(rows.p_lse + o_head, gl.where(total == 0, float("inf"), lse * LN_2), mask=o_head < heads)
        if rows.p_sink is not None:
            # Computed as the combine kernel does for one split, so that the bits are equal.
            sink = gl.load(rows.p_sink + o_head, mask=o_head < heads, other=0.0)
            kept = 1.0 / (1.0 + gl.exp2(sink * LOG2_E - gl.where(total == 0, 0.0, lse)))
            acc = acc * gl.expand_dims(gl.convert_layout(kept, HEADS), 0)
        q_tile.store(acc.to(gl.bfloat16).permute((1, 0)))
        thread_barrier()
        store_few_rows(q_tile, rows, queries.p_cos, PARTIAL, EPILOGUE)


@gluon.jit(**CHANGING)
def sparse_mla_decode_sm90_few_heads_kernel(
    outputs,  # out [T, H, 512] bfloat16 or e4m3 [groups, T, K], lse [T, H] float32 or None, scale; or `Partials`
    p_q,  # [T, H, 512] bfloat16
    window,  # words [P, page_bytes / 4] int32, or plain [P, page tokens, 256] int32; and indices [T, W] int
    p_window_lens,  # [T] int
    extra,  # words, and indices [T, K] int
    p_extra_lens,
    p_sink,  # [H] float32 or None
    p_positions,  # [T] int or None
    p_table,  # [max_pos, rope] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the query norm, None for queries that are normed and rotated
    splits,
    min_blocks,
    first_token,  # of this launch
    tokens,
    padded_tokens,
    strides,  # `DecodeStrides`
    max_pos,
    window_width,
    extra_width,
    window_capacity,  # slots in the cache
    extra_capacity,
    SHAPE: gl.constexpr,  # `DecodeShape`
    TILING: gl.constexpr,  # `Tiling`
    EPILOGUE: gl.constexpr,
):
    """Attend head block p % HEAD_BLOCKS of split p // HEAD_BLOCKS; the splits of a token are neighbours."""
    H: gl.constexpr = SHAPE.heads
    PLAIN: gl.constexpr = SHAPE.plain
    WINDOW_LOG_PAGE: gl.constexpr = SHAPE.window_log_page
    EXTRA_LOG_PAGE: gl.constexpr = SHAPE.extra_log_page
    BLOCK_H: gl.constexpr = TILING.block_h
    BUFFERS: gl.constexpr = TILING.buffers
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, D], SWIZZLED)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    lives = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=COPY_ARRIVALS if PLAIN else 1)
        mbarrier.init(free.index(i), count=1)
    gdc_launch_dependents()
    gdc_wait()
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    p_out, p_lse, p_scale = outputs
    p_window_words, p_window_indices = window
    p_extra_words, p_extra_indices = extra
    split = gl.program_id(0) // HEAD_BLOCKS
    head = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    token = (first_token + (split // splits if EPILOGUE.split else split)).to(gl.int64)
    window_length = row_length(p_window_lens, strides.window_lens, token, window_width)
    extra_length = row_length(p_extra_lens, strides.extra_lens, token, extra_width)
    if p_positions is not None:
        p_table = angle_pointer(p_positions, p_table, strides, max_pos, token)
    window_blocks = (window_length + BLOCK_N - 1) // BLOCK_N
    blocks = window_blocks + (extra_length + BLOCK_N - 1) // BLOCK_N
    begin, end = 0, blocks
    if EPILOGUE.split:
        begin, end = split_range(blocks, split, splits, min_blocks)
    p_q += token * strides.q_token + head.to(gl.int64) * strides.q_head
    p_window_row = p_window_indices + token * strides.window_indices
    p_extra_row = p_extra_indices + token * strides.extra_indices
    if p_sink is not None:
        p_sink += head
    if EPILOGUE.split:
        row = split.to(gl.int64) * H + head
        p_out += row * D
        p_lse += row
    else:
        if EPILOGUE.groups == 0:
            p_out += token * strides.out_token + head.to(gl.int64) * strides.out_head
        if p_lse is not None:
            p_lse += token * strides.lse + head
    queries = Queries(p_q, strides.q_head, p_table, eps)
    heads = H - head
    rows = HeadRows(p_sink, p_lse, p_out, strides.out_head, p_scale, tokens, padded_tokens, token, head, heads)
    ring = KeyRing(keys, lives, ready, free)
    gl.warp_specialize([
        (_consumer, (queries, rows, scale, end - begin, (q_tile, weights_tile), ring, PARTIAL, EPILOGUE, PLAIN)),
        (_copier if PLAIN else _producer, (
            KeyRow(p_window_words, strides.window_page, p_window_row, window_length, window_capacity,
                   WINDOW_LOG_PAGE),
            KeyRow(p_extra_words, strides.extra_page, p_extra_row, extra_length, extra_capacity, EXTRA_LOG_PAGE),
            window_blocks, begin, end, ring,
        )),
    ], [8], [TILING.registers])  # fmt: skip


class Tiling(NamedTuple):
    """Tiling of a program: its heads, registers of a producer's threads, and buffers of 64 keys."""

    block_h: int
    registers: int
    buffers: int


TILINGS = {8: Tiling(8, 168, 3), 16: Tiling(16, 160, 3), MAX_HEADS: Tiling(MAX_HEADS, 144, 2)}


def choose_tiling(heads: int) -> Tiling:
    """Return the smallest program that takes `heads` heads."""
    return TILINGS[max(MIN_BLOCK_H, triton.next_power_of_2(heads))]


def why_unsupported(call: DecodeCall) -> str:
    """Return why this kernel does not support a call that the Triton kernel supports, "" if it does."""
    if call.q.shape[1] > MAX_HEADS:
        return f"it takes {MAX_HEADS} heads or fewer, these are {call.q.shape[1]}"
    return why_unsupported_sm90(call)


def launch(
    call: DecodeCall, gpu: Gpu, splits: int = 0, into: Outputs | None = None, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Run `call` on `gpu` and return its outputs, in `into` or newly allocated.

    `splits` and `tiling` overrule `split_plan` and `choose_tiling`.
    """
    tiling = tiling or choose_tiling(call.q.shape[1])
    variant = Variant(sparse_mla_decode_sm90_few_heads_kernel, {"TILING": tiling}, tiling.block_h, KEYS)
    return launch_variant(variant, call, gpu, splits, into)
