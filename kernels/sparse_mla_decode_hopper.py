"""Sparse MLA decode on Hopper, in Gluon: `fp8_ds_mla` caches, bfloat16 queries, any multiple of 64 heads.

A program attends 64 heads of one token to its share of the token's keys, window cache first, 64 keys at a time. It is
three warpgroups, between which stand two buffers of dequantised keys:

    producer  gathers 32 keys at a time into registers, dequantises them exactly, stores them swizzled
    left      scores, online softmax, weights to shared memory, dims 0 to 255 of the output
    right     dims 256 to 511

The producer sets the pace. Of the registers, left has 208, right 160, the producer 136: with fewer than 160, the
compiler would serialise the matrix products of a warpgroup.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from .. import layout
from .gpu import Gpu
from .kv_load_hopper import produce_keys, thread_barrier
from .sparse_mla_decode_portable import Source, outputs, part_count
from .split_softmax import LN_2 as _LN_2
from .split_softmax import LOG2_E as _LOG2_E
from .split_softmax import part_buffers, split_softmax

HEADS = 64
KEYS = 64
PAGE_ALIGN = 16
RIGHT_REGISTERS, PRODUCER_REGISTERS = 160, 136
WIDE = True
_HALF = layout.HEAD_DIM // 2

D = gl.constexpr(layout.HEAD_DIM)
HALF = gl.constexpr(_HALF)
BLOCK_H = gl.constexpr(HEADS)
BLOCK_N = gl.constexpr(KEYS)
BUFFERS = gl.constexpr(2)
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)

HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _HALF, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _producer(
    p_words0, p_scales0, page_chunks0, p_row0, length0, capacity0, begin0, end0,
    p_words1, p_scales1, page_chunks1, p_row1, length1, capacity1, begin1, end1,
    keys, lives, ready, free, LOG_PAGE0: gl.constexpr, LOG_PAGE1: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The third warpgroup."""
    produce_keys(
        p_words0, p_scales0, page_chunks0, p_row0, length0, capacity0, begin0, end0, -begin0,
        keys, lives, ready, free, LOG_PAGE0, WIDE,
    )  # fmt: skip
    produce_keys(
        p_words1, p_scales1, page_chunks1, p_row1, length1, capacity1, begin1, end1, end0 - begin0 - begin1,
        keys, lives, ready, free, LOG_PAGE1, WIDE,
    )  # fmt: skip


@gluon.jit
def _load_half_of_q(p_q, head_stride, q_tile, FIRST: gl.constexpr):
    """Columns FIRST to FIRST + 255 of the queries into shared memory."""
    o_head = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, HALF_ROWS)), 1)
    o_dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, HALF_ROWS)), 0)
    q_tile.slice(FIRST, HALF, 1).store(gl.load(p_q + (o_head.to(gl.int64) * head_stride + FIRST + o_dim)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _store_half(acc, q_tile, p_out, SPLIT: gl.constexpr, FIRST: gl.constexpr):
    """Columns FIRST to FIRST + 255 of the output, by way of the queries' shared memory where they are bfloat16."""
    if SPLIT:
        o_head = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, OUTPUT)), 1)
        o_dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, OUTPUT)), 0)
        gl.store(p_out + o_head * D + FIRST + o_dim, acc)
    else:
        half = q_tile.slice(FIRST, HALF, 1)
        half.store(acc.to(gl.bfloat16))
        thread_barrier()
        o_head = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, HALF_ROWS)), 1)
        o_dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, HALF_ROWS)), 0)
        gl.store(p_out + o_head * D + FIRST + o_dim, half.load(HALF_ROWS))


@gluon.jit
def _lane_sums(weights):
    """`[64, 8]`: sums over the part of a row that a thread holds."""
    return gl.sum(gl.reshape(weights, [BLOCK_H, BLOCK_N // 8, 8]), 1)


@gluon.jit
def _scores(q_tile, keys):
    """Start the scores of a block of keys."""
    zero = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    return warpgroup_mma(q_tile, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, live, acc, top, sums, number, scale, weights_tile, factors, weights_ready, weights_free):
    """Weights of block `number` into shared memory for both consumers, and the sums so far rescaled."""
    scores = gl.where(gl.expand_dims(live, 0) > 0, scores * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    # -inf - -inf is NaN: a head without keys so far is shifted by zero.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = gl.exp2(top - shift)
    weights = gl.exp2(scores - gl.expand_dims(shift, 1))
    mbarrier.wait(weights_free, (number & 1) ^ 1)
    weights_tile.store(weights.to(gl.bfloat16))
    factors.store(rescale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(weights_ready, count=1)
    sums = sums * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout)), 1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT)), 1)
    return acc, new_top, sums + _lane_sums(weights)


@gluon.jit
def _left(
    p_q, q_head_stride, p_sink, p_out, p_lse, scale, blocks, q_tile, keys, weights_tile, factors, lives,
    ready, free, weights_ready, weights_free, q_ready, SPLIT: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, softmax, the left half of the output."""
    _load_half_of_q(p_q, q_head_stride, q_tile, 0)
    mbarrier.wait(q_ready, 0)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = _lane_sums(gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES))
    if blocks > 0:
        mbarrier.wait(ready.index(0), 0)
        scores = _scores(q_tile, keys.index(0))
        live = lives.index(0).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[scores])
        for number in range(blocks - 1):
            buffer = number % BUFFERS
            following = (number + 1) % BUFFERS
            acc, top, sums = _softmax(
                scores, live, acc, top, sums, number, scale, weights_tile, factors, weights_ready, weights_free
            )
            acc = warpgroup_mma(weights_tile, keys.index(buffer).slice(0, HALF, 1), acc, is_async=True)
            mbarrier.wait(ready.index(following), ((number + 1) // BUFFERS) & 1)
            scores = _scores(q_tile, keys.index(following))
            live = lives.index(following).load(gl.SliceLayout(0, SCORES))
            acc = warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()
            mbarrier.arrive(free.index(buffer), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, sums = _softmax(
            scores, live, acc, top, sums, blocks - 1, scale, weights_tile, factors, weights_ready, weights_free
        )
        last = keys.index((blocks - 1) % BUFFERS).slice(0, HALF, 1)
        acc = warpgroup_mma(weights_tile, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    o_head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    shift = gl.where(top == float("-inf"), 0.0, top)
    denominator = total
    if SPLIT:
        gl.store(p_lse + o_head, gl.where(total == 0, float("-inf"), shift + gl.log2(total)))
    else:
        gl.store(p_lse + o_head, gl.where(total == 0, float("inf"), (shift + gl.log2(total)) * LN_2))
        if p_sink is not None:
            denominator = total + gl.exp2(gl.load(p_sink + o_head) * LOG2_E - shift)
    factor = gl.where(total == 0, 0.0, 1.0 / denominator)
    mbarrier.wait(weights_free, (blocks & 1) ^ 1)
    factors.store(factor)
    thread_barrier()
    mbarrier.arrive(weights_ready, count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), 1)
    _store_half(acc, q_tile, p_out, SPLIT, 0)


@gluon.jit
def _right(
    p_q, q_head_stride, p_out, blocks, q_tile, keys, weights_tile, factors,
    ready, free, weights_ready, weights_free, q_ready, SPLIT: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: the right half of the output."""
    _load_half_of_q(p_q, q_head_stride, q_tile, HALF)
    mbarrier.arrive(q_ready, count=1)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
    for number in range(blocks):
        buffer = number % BUFFERS
        mbarrier.wait(ready.index(buffer), (number // BUFFERS) & 1)
        mbarrier.wait(weights_ready, number & 1)
        acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, OUTPUT)), 1)
        acc = warpgroup_mma(weights_tile, keys.index(buffer).slice(HALF, HALF, 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(weights_free, count=1)
        mbarrier.arrive(free.index(buffer), count=1)
    mbarrier.wait(weights_ready, blocks & 1)
    acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, OUTPUT)), 1)
    _store_half(acc, q_tile, p_out, SPLIT, HALF)


@gluon.jit
def _length(p_lens, stride, token, width):
    """int32 number of columns that count in a token's row of indices."""
    return gl.minimum(gl.maximum(gl.load(p_lens + token * stride), 0), width).to(gl.int32)


@gluon.jit(do_not_specialize=["splits", "width0", "width1", "capacity0", "capacity1"])
def sparse_mla_decode_hopper_kernel(
    p_out,  # [T, H, 512] bfloat16, or parts [T, splits, H, 512] float32; contiguous
    p_lse,  # [T, H] float32, or parts [T, splits, H] in base 2; contiguous
    p_q,  # [T, H, 512] bfloat16
    p_words0,  # [P, page_bytes / 4] int32
    p_scales0,  # [P, page_bytes / 8] int64, the same memory
    p_indices0,  # [T, W] int
    p_lens0,  # [T] int
    p_words1,
    p_scales1,
    p_indices1,  # [T, K] int
    p_lens1,
    p_sink,  # [H] float32 or None
    scale,  # of the scores, times log2(e)
    splits,
    q_token_stride,
    q_head_stride,
    page_chunks0,  # distance of two pages in units of 16 bytes
    page_chunks1,
    indices0_stride,
    indices1_stride,
    lens0_stride,
    lens1_stride,
    width0,
    width1,
    capacity0,  # slots in the cache
    capacity1,
    H: gl.constexpr,
    LOG_PAGE0: gl.constexpr,  # of the tokens in a page
    LOG_PAGE1: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    WIDE: gl.constexpr,
    SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program p takes head block p % (H / 64) of part p // (H / 64); the parts of a token are neighbours."""
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, D], SWIZZLED)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    lives = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(weights_ready, count=1)
    mbarrier.init(weights_free, count=1)
    mbarrier.init(q_ready, count=1)
    if SPLIT:
        gdc_launch_dependents()
    HEAD_BLOCKS: gl.constexpr = H // BLOCK_H
    part = gl.program_id(0) // HEAD_BLOCKS
    head = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    token = (part // splits).to(gl.int64)
    length0 = _length(p_lens0, lens0_stride, token, width0)
    length1 = _length(p_lens1, lens1_stride, token, width1)
    blocks0 = (length0 + BLOCK_N - 1) // BLOCK_N
    blocks = blocks0 + (length1 + BLOCK_N - 1) // BLOCK_N
    begin = blocks * (part % splits) // splits
    end = blocks * (part % splits + 1) // splits
    begin0, end0 = gl.minimum(begin, blocks0), gl.minimum(end, blocks0)
    begin1, end1 = gl.maximum(begin - blocks0, 0), gl.maximum(end - blocks0, 0)
    row = part.to(gl.int64) * H + head
    p_q += token * q_token_stride + head.to(gl.int64) * q_head_stride
    p_row0 = p_indices0 + token * indices0_stride
    p_row1 = p_indices1 + token * indices1_stride
    if p_sink is not None:
        p_sink += head
    gl.warp_specialize([
        (_left, (p_q, q_head_stride, p_sink, p_out + row * D, p_lse + row, scale, end - begin, q_tile, keys,
                 weights_tile, factors, lives, ready, free, weights_ready, weights_free, q_ready, SPLIT)),
        (_right, (p_q, q_head_stride, p_out + row * D, end - begin, q_tile, keys, weights_tile, factors,
                  ready, free, weights_ready, weights_free, q_ready, SPLIT)),
        (_producer, (p_words0, p_scales0, page_chunks0, p_row0, length0, capacity0, begin0, end0,
                     p_words1, p_scales1, page_chunks1, p_row1, length1, capacity1, begin1, end1,
                     keys, lives, ready, free, LOG_PAGE0, LOG_PAGE1, WIDE)),
    ], [4, 4], [RIGHT_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def hopper_refuses(q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    sources = (window, extra)
    if cache_format != "fp8_ds_mla" or q.dtype is not torch.bfloat16 or q.shape[1] == 0 or q.shape[1] % HEADS != 0:
        return f"it takes fp8_ds_mla, bfloat16 queries and multiples of {HEADS} heads"
    if any((s.block_size & (s.block_size - 1)) or s.cache.stride(0) % PAGE_ALIGN for s in sources):
        return f"it takes pages of a power of two of tokens, a multiple of {PAGE_ALIGN} bytes apart"
    if any(s.cache.storage_offset() % PAGE_ALIGN for s in sources):
        return f"it takes caches that start at a multiple of {PAGE_ALIGN} bytes"
    rows = [q, window.indices, extra.indices] if sink is None else [q, sink, window.indices, extra.indices]
    return "" if all(x.stride(-1) == 1 for x in rows) else "it takes rows whose elements are neighbours"


def launch_hopper(
    q: Tensor, window: Source, extra: Source, scale: float, sink: Tensor | None, gpu: Gpu, splits: int = 0
) -> tuple[Tensor, Tensor]:
    """`out` `[T, H, 512]` and `lse` `[T, H]`, as `launch` of the portable kernel."""
    out, lse = outputs(q)
    if lse.numel() == 0:
        return out, lse
    tokens, heads, head_dim = q.shape
    # The producer reads the first key in place of none: rows of a cache without pages are empty.
    width0, width1 = (s.indices.shape[1] if s.cache.shape[0] else 0 for s in (window, extra))
    programs = tokens * (heads // HEADS)
    splits = splits or part_count(programs, layout.cdiv(width0, KEYS) + layout.cdiv(width1, KEYS), gpu)
    part, part_lse = part_buffers(tokens, splits, heads, head_dim, q) if splits > 1 else (out, lse)
    pages0, pages1 = (layout.byte_pages(s.cache, "fp8_ds_mla", s.block_size) for s in (window, extra))
    sparse_mla_decode_hopper_kernel[(programs * splits,)](
        part,
        part_lse,
        q,
        pages0.view(torch.int32),
        pages0.view(torch.int64),
        window.indices,
        window.lens,
        pages1.view(torch.int32),
        pages1.view(torch.int64),
        extra.indices,
        extra.lens,
        sink,
        scale * _LOG2_E.value,
        splits,
        q.stride(0),
        q.stride(1),
        pages0.stride(0) // PAGE_ALIGN,
        pages1.stride(0) // PAGE_ALIGN,
        window.indices.stride(0),
        extra.indices.stride(0),
        window.lens.stride(0),
        extra.lens.stride(0),
        width0,
        width1,
        pages0.shape[0] * window.block_size,
        pages1.shape[0] * extra.block_size,
        H=heads,
        LOG_PAGE0=window.block_size.bit_length() - 1,
        LOG_PAGE1=extra.block_size.bit_length() - 1,
        RIGHT_REGISTERS=RIGHT_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        WIDE=WIDE,
        SPLIT=splits > 1,
        num_warps=4,
    )
    if splits > 1:
        split_softmax(out, lse, part, part_lse, sink, dependent=True)
    return out, lse
