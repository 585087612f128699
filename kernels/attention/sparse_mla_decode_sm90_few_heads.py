"""Sparse MLA decode of few heads on Hopper, in Gluon: `fp8_ds_mla` caches, bfloat16 queries, blocks of 8 to 32 heads.

Matrix products of few heads are cheap, and keys cost what they cost for many. So one warpgroup of three attends:

    consumer  scores of 64 keys, online softmax, weights to shared memory, all dims of the output
    producer  two warpgroups: gathers 64 keys into registers, dequantises them exactly, stores them swizzled

Keys are the rows of both products and heads their columns, so that nothing is multiplied for heads that do not exist.
Between the two stand two or three buffers of 64 keys. A program takes a block of heads of one token and its share of
the token's keys, window cache first.

As in the kernel for many heads, code that comes out of memory costs as much as it is long: with both ends fused and
quantised it was 53, 70 and 103 KB for 8, 16 and 32 heads and is 32, 39 and 48. A producer of two warpgroups is there
once, where two producers of one would be there twice; queries are normed and rows finished in loops; and a turn of the
consumer's loop waits for both of its products. If the last of a turn ran on into the next, the compiler would serialise
all products, unless a turn was there twice; and what the next turn waits for is keys.

Of a multiprocessor's registers a thread of the producer has 144 to 168, whatever takes the least time. A producer of
three warpgroups, which then spills, took 33 us where two take 25 (8 heads, 128 tokens of 640 keys, H200).

Few heads on Hopper: which calls sparse_mla_decode_kernel_few_hopper.py takes, and how it is launched.
"""

from __future__ import annotations

from typing import NamedTuple

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
from ..host.pdl import pdl_option
from .kv_load_sm90 import SWIZZLED_WORDS, dequantize_keys, fetch_keys, row_length
from .output_epilogue_sm90 import SWIZZLED, D, fetch_angles, store_few_rows
from .query_prologue_sm90 import fetch_queries, norm_queries, queries_of, turning_of
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source
from .sparse_mla_decode_sm90_launch import gather_refuses, launch_gathering
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

KEYS = 64

BLOCK_N = gl.constexpr(KEYS)
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)
KEY_WORDS = gl.constexpr(layout.HEAD_DIM // 2)
HEAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# As in kv_load_hopper.py, for twice as many warps.
_WORDS = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [8, 1, 1], [2, 1, 0])
WORDS = gl.constexpr(_WORDS)
SLOTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _WORDS)))
ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))


@gluon.jit
def _cache_of(source0, source1, blocks0, block):
    """Of the caches `source0` and `source1` the one that `block` belongs to, and the block's first column there."""
    first = block < blocks0
    p_words = gl.where(first, source0[0], source1[0])
    chunks = gl.where(first, source0[1], source1[1])
    p_row = gl.where(first, source0[2], source1[2])
    length = gl.where(first, source0[3], source1[3])
    capacity = gl.where(first, source0[4], source1[4])
    log_page = gl.where(first, source0[5], source1[5])
    return p_words, chunks, p_row, length, capacity, log_page, (block - gl.where(first, 0, blocks0)) * BLOCK_N


@gluon.jit
def _slots(source0, source1, blocks0, block, end):
    """int32 slots of a block; -1 for what is none, and from block `end` on."""
    # The last block stands in for those behind it: the other cache may have no pages.
    _, _, p_row, length, capacity, _, column = _cache_of(source0, source1, blocks0, gl.minimum(block, end - 1))
    o_column = column + gl.arange(0, BLOCK_N, SLOTS)
    slot = gl.load(p_row + o_column, mask=o_column < gl.where(block < end, length, 0), other=-1)
    return gl.where((slot >= 0) & (slot < capacity), slot, -1).to(gl.int32)


@gluon.jit
def _fetch(source0, source1, blocks0, block, end, slot):
    """`fetch_keys` from the cache of `block`, with its stand-in as `_slots`."""
    p_words, chunks, _, _, _, log_page, _ = _cache_of(source0, source1, blocks0, gl.minimum(block, end - 1))
    return fetch_keys(p_words, chunks, slot, log_page, WORDS, ROPES)


@gluon.jit
def _producer(
    p_words0, chunks0, p_row0, length0, capacity0, p_words1, chunks1, p_row1, length1, capacity1,
    blocks0, begin, end, keys, lives, ready, free,
    LOG_PAGE0: gl.constexpr, LOG_PAGE1: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The second and the third warpgroup: the keys."""
    BUFFERS: gl.constexpr = keys.shape[0]
    words = reinterpret(keys, gl.int32, [BUFFERS, BLOCK_N, KEY_WORDS], SWIZZLED_WORDS)
    source0 = p_words0, chunks0, p_row0, length0, capacity0, LOG_PAGE0
    source1 = p_words1, chunks1, p_row1, length1, capacity1, LOG_PAGE1
    if end > begin:
        slot = _slots(source0, source1, blocks0, begin, end)
        next_slot = _slots(source0, source1, blocks0, begin + 1, end)
        codes, rope, scales = _fetch(source0, source1, blocks0, begin, end, slot)
        for block in range(begin, end):
            number = block - begin
            buffer = number % BUFFERS
            now_codes, now_rope, now_scales, now_slot = codes, rope, scales, slot
            slot = next_slot
            # The next keys are on their way while these are dequantised.
            codes, rope, scales = _fetch(source0, source1, blocks0, block + 1, end, slot)
            next_slot = _slots(source0, source1, blocks0, block + 2, end)
            pairs = dequantize_keys(now_codes, now_rope, now_scales, now_slot >= 0, WIDE, WORDS)
            mbarrier.wait(free.index(buffer), ((number // BUFFERS) & 1) ^ 1)
            words.index(buffer).store(pairs)
            lives.index(buffer).store(gl.where(now_slot >= 0, 1.0, 0.0))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)


@gluon.jit
def _scores(keys, q_tile, MMA: gl.constexpr):
    """Start the scores of a block of keys, `[keys, heads]`."""
    N: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([BLOCK_N, N], gl.float32, MMA)
    return warpgroup_mma(keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, live, acc, top, sums, scale, weights_tile):
    """Weights of a block into shared memory, and the sums so far rescaled."""
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
    p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_lse, p_scale, tokens, padded_tokens, token,
    head, heads, scale, blocks, q_tile, keys, weights_tile, lives, ready, free, SPLIT: gl.constexpr,
    ROPE: gl.constexpr, PARTIAL: gl.constexpr, INVERSE: gl.constexpr, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: everything but the keys."""
    N: gl.constexpr = q_tile.shape[0]  # heads
    BUFFERS: gl.constexpr = keys.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, MMA)
    LIVE: gl.constexpr = gl.SliceLayout(1, MMA)
    QUERIES: gl.constexpr = queries_of(N)
    q = fetch_queries(p_q, q_head_stride, heads, N, PARTIAL, QUERIES)
    if eps is not None:
        # On their way together with the queries.
        cos, sin = fetch_angles(p_table, gl.zeros([N, turning_of(N, ROPE)], gl.bfloat16, QUERIES), ROPE)
    q_tile.store(q)
    if eps is not None:
        norm_queries(q_tile, cos, sin, eps, ROPE)
    fence_async_shared()
    thread_barrier()
    acc = gl.zeros([D, N], gl.float32, MMA)
    sums = gl.zeros([BLOCK_N, N], gl.float32, MMA)
    top = gl.full([N], float("-inf"), gl.float32, HEADS)
    for number in range(blocks):
        buffer = number % BUFFERS
        mbarrier.wait(ready.index(buffer), (number // BUFFERS) & 1)
        scores = _scores(keys.index(buffer), q_tile, MMA)
        live = lives.index(buffer).load(LIVE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, sums = _softmax(scores, live, acc, top, sums, scale, weights_tile)
        acc = warpgroup_mma(keys.index(buffer).permute((1, 0)), weights_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(free.index(buffer), count=1)
    # A head for each thread: of the products' columns it has several.
    total = gl.convert_layout(gl.sum(sums, 0), HEAD)
    top = gl.convert_layout(top, HEAD)
    o_head = gl.arange(0, N, HEAD)
    shift = gl.where(top == float("-inf"), 0.0, top)
    lse = gl.where(total == 0, float("-inf"), shift + gl.log2(total))
    factor = gl.where(total == 0, 0.0, 1.0 / total)
    acc = acc * gl.expand_dims(gl.convert_layout(factor, HEADS), 0)
    if SPLIT:
        gl.store(p_lse + o_head, lse, mask=o_head < heads)
        if blocks > 0:
            o_column = gl.expand_dims(gl.arange(0, N, HEADS), 0)
            o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, MMA)), 1)
            gl.store(p_out + (o_column * D + o_dim), acc, mask=(o_column < heads) & (o_dim >= 0))
    else:
        if p_lse is not None:
            gl.store(p_lse + o_head, gl.where(total == 0, float("inf"), lse * LN_2), mask=o_head < heads)
        if p_sink is not None:
            # As a row of one part is joined, so that it gives the same bits.
            sink = gl.load(p_sink + o_head, mask=o_head < heads, other=0.0)
            share = 1.0 / (1.0 + gl.exp2(sink * LOG2_E - gl.where(total == 0, 0.0, lse)))
            acc = acc * gl.expand_dims(gl.convert_layout(share, HEADS), 0)
        q_tile.store(acc.to(gl.bfloat16).permute((1, 0)))
        thread_barrier()
        store_few_rows(
            q_tile, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, p_table, ROPE, PARTIAL,
            INVERSE, GROUPS, GROUP_HEADS, PACKED,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "splits", "least", "first", "tokens", "padded_tokens", "max_pos", "capacity0", "capacity1", "width0", "width1",
    ],
    # A piece of a batch begins anywhere.
    do_not_specialize_on_alignment=["p_lens0", "p_lens1", "p_positions"],
)  # fmt: skip
def sparse_mla_decode_few_hopper_kernel(
    p_out,  # [T, H, 512] bfloat16 or e4m3 [GROUPS, T, K]; or parts [N, splits, H, 512] float32, contiguous
    p_lse,  # [T, H] float32, neighbouring heads, or None; or parts [N, splits, H] in base 2, contiguous
    p_scale,  # of e4m3, see attention_rows_hopper.store_rows
    p_q,  # [T, H, 512] bfloat16
    p_words0,  # [P, page_bytes / 4] int32
    p_indices0,  # [T, W] int
    p_lens0,  # [T] int
    p_words1,
    p_indices1,  # [T, K] int
    p_lens1,
    p_sink,  # [H] float32 or None
    p_positions,  # [T] int or None
    p_table,  # [max_pos, ROPE] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the queries' norm, None for queries that are ready
    splits,
    least,
    first,  # token of this launch
    tokens,
    padded_tokens,
    out_token_stride,
    out_head_stride,
    lse_stride,
    q_token_stride,
    q_head_stride,
    page_chunks0,  # distance of two pages in units of 16 bytes
    page_chunks1,
    indices0_stride,
    indices1_stride,
    lens0_stride,
    lens1_stride,
    position_stride,
    table_stride,
    max_pos,
    width0,
    width1,
    capacity0,  # slots in the cache
    capacity1,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BUFFERS: gl.constexpr,
    LOG_PAGE0: gl.constexpr,  # of the tokens in a page
    LOG_PAGE1: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    WIDE: gl.constexpr,
    SPLIT: gl.constexpr,
    ROPE: gl.constexpr,
    INVERSE: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program p takes head block p % HEAD_BLOCKS of part p // HEAD_BLOCKS; the parts of a token are neighbours."""
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, D], SWIZZLED)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    lives = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gdc_launch_dependents()
    gdc_wait()
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    part = gl.program_id(0) // HEAD_BLOCKS
    head = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    heads = H - head
    token = (first + (part // splits if SPLIT else part)).to(gl.int64)
    length0 = row_length(p_lens0, lens0_stride, token, width0)
    length1 = row_length(p_lens1, lens1_stride, token, width1)
    if p_positions is not None:
        position = gl.load(p_positions + token * position_stride).to(gl.int64)
        p_table += gl.minimum(gl.maximum(position, 0), max_pos - 1) * table_stride
    blocks0 = (length0 + BLOCK_N - 1) // BLOCK_N
    blocks = blocks0 + (length1 + BLOCK_N - 1) // BLOCK_N
    begin, end = 0, blocks
    if SPLIT:
        # The programs of a token beyond its parts have nothing to do.
        parts = gl.maximum(gl.minimum(splits, (blocks + least - 1) // least), 1)
        begin = blocks * gl.minimum(part % splits, parts) // parts
        end = blocks * gl.minimum(part % splits + 1, parts) // parts
    p_q += token * q_token_stride + head.to(gl.int64) * q_head_stride
    p_row0 = p_indices0 + token * indices0_stride
    p_row1 = p_indices1 + token * indices1_stride
    if p_sink is not None:
        p_sink += head
    if SPLIT:
        row = part.to(gl.int64) * H + head
        p_out += row * D
        p_lse += row
    else:
        if GROUPS == 0:
            p_out += token * out_token_stride + head.to(gl.int64) * out_head_stride
        if p_lse is not None:
            p_lse += token * lse_stride + head
    gl.warp_specialize([
        (_consumer, (p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_lse, p_scale, tokens,
                     padded_tokens, token, head, heads, scale, end - begin, q_tile, keys, weights_tile, lives,
                     ready, free, SPLIT, ROPE, PARTIAL, INVERSE, GROUPS, GROUP_HEADS, PACKED)),
        (_producer, (p_words0, page_chunks0, p_row0, length0, capacity0, p_words1, page_chunks1,
                     p_row1, length1, capacity1, blocks0, begin, end, keys, lives, ready, free,
                     LOG_PAGE0, LOG_PAGE1, WIDE)),
    ], [8], [PRODUCER_REGISTERS])  # fmt: skip


MOST_HEADS = 32
SMALLEST_BLOCK = 8
WIDE = True


class Shape(NamedTuple):
    """Of a program: heads it takes, registers of a producer's threads, and buffers of 64 keys."""

    block_h: int
    registers: int
    buffers: int


# One H200, 128 tokens of 640 keys back to back, in us, 1 us apart from run to run, with a producer for each half:
#  8 heads 24.8; two buffers 23.9, 176 registers 26.0, 152 registers 30.1
# 16 heads 27.4; two buffers 28.1, 168 registers 29.7
# 32 heads 32.8; 136 registers 33.0, 152 registers 41.6; three buffers do not fit
# Keys brought into the L2 cache two or three blocks ahead make 24.8 longer: 26 to 27 line by line, 35 to 38 in bulk.
SHAPES = {8: Shape(8, 168, 3), 16: Shape(16, 160, 3), MOST_HEADS: Shape(MOST_HEADS, 144, 2)}


def shape_of(heads: int) -> Shape:
    """The smallest program that takes `heads` heads."""
    return SHAPES[max(SMALLEST_BLOCK, triton.next_power_of_2(heads))]


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if q.shape[1] > MOST_HEADS:
        return f"it takes {MOST_HEADS} heads or fewer"
    return gather_refuses(q, window, extra, cache_format, sink, fusion)


def launch_hopper(
    q: Tensor,
    window: Source,
    extra: Source,
    scale: float,
    sink: Tensor | None,
    gpu: Gpu,
    splits: int = 0,
    fusion: Fusion = PLAIN,
    into: Results | None = None,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel."""
    block_h, registers, buffers = shape or shape_of(q.shape[1])
    constants = {"BLOCK_H": block_h, "BUFFERS": buffers, "PRODUCER_REGISTERS": registers, "WIDE": WIDE}
    return launch_gathering(
        sparse_mla_decode_few_hopper_kernel,
        block_h,
        KEYS,
        constants | pdl_option(True),
        q,
        window,
        extra,
        scale,
        sink,
        gpu,
        splits,
        fusion,
        into,
    )
