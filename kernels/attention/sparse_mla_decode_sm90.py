"""Sparse MLA decode on Hopper, in Gluon: `fp8_ds_mla` caches, bfloat16 queries, best with a multiple of 64 heads.

A program attends 64 heads of one token to its share of the token's keys, window cache first, 64 keys at a time. It is
three warpgroups, between which stand two buffers of dequantised keys:

    producer  gathers 32 keys at a time into registers, dequantises them exactly, stores them swizzled
    left      scores, online softmax, weights to shared memory, dims 0 to 255 of the output
    right     where the keys are that will be gathered, and dims 256 to 511

Left and right each load half of the heads' queries while the first keys are on their way. To norm and rotate them, left
turns their last columns, and the norm is a factor of scores (queries_hopper.py). Each finishes its half of the dims,
and rotates back and quantises them if asked to. Right is four blocks ahead of its products: it reads the slots of both
caches, writes down where each key lies, which is one row for the producer, and asks the L2 cache for them.

In a row of layers other kernels take the instruction cache, and the weights of a layer are more than the L2 cache, so
that code comes out of memory: what is gone through once costs as much as it is long. This one was 148 KB with both ends
fused and is 81, by loops in the place of copies, one row of keys in the place of two, sums multiplied where they are
stored, and a norm of scores. Between projections the first two took 128 tokens of 128, 256 and 640 keys from 31.6, 40.2
and 54.4 us to 19.7, 25.4 and 39.7, and 512 from 86 and 218 to 70 and 159 (128 and 640 keys); the third 128 tokens of
640 keys from 41.1 to 37.8, and back to back, with code at hand, from 36.8 to 39.7; the last 128 and 512 tokens of 128
keys from 20.7 and 72 to 19.5 and 70 (`examples/benchmarks/attention_between_projections.py`).

Of the registers, left has 200, right 160, the producer 144: with fewer than 160, the compiler would serialise the
matrix products of a warpgroup. What is spilled in a loop costs most: gathers leave nothing of it in the L1 cache.

Where the time of 512 tokens with 64 heads and 640 keys went on an H200 when dequantising took nine instructions for
four codes, 156 us with 136 registers for the producer: 147 with one factor for all scales, which is wrong for those
above 2^7; of these, 132 without the producer's arithmetic, 126 without its loads, 106 without both and 101 without its
stores too. One warp of it for each scheduler waits for its 32 keys, and shared memory has no room for more of them.
With eight instructions, half of them no longer on the unit that is short, and 144 registers it takes 142. Then a third
of the issue slots is used, and two fifths of the tensor pipe's time; for each instruction issued four warps wait for
memory (`examples/benchmarks/sparse_mla_counters.py`).

Tried on an H200 without gain, with times of 128 tokens, 64 heads, 40.7 us otherwise, or 128 heads and 1152 keys, 120 us
otherwise: keys in four pieces of dims with memory and barriers of their own, so that a whole block is on its way; a
producer of eight warps; products of the right half held back until the next scores are there, as prefill does; programs
that walk over tokens, 48 us, with both caches and all tokens as one stream of keys, 52, or with the next token's keys
found and gathered while rows are stored (512 tokens of 128 keys 88 us, 63 otherwise: what an item needs outlives the
loops, and is spilled); slots known a block and a half ahead, 46; parts joined by the programs that made them instead of
a second launch; clusters of two programs with the two halves of 128 heads, each of which dequantises half of a block
for both and copies it to the other, 121 us, or stores it there by `st.async`, 163: without sending it would be 99; 32
keys of each block by way of shared memory, as they are stored, so that each half has a whole block's time to arrive,
47; keys reduced to scales that have a bfloat16 factor, which scores and weights make up for, in place of a second
factor, 38.4 where two factors take 36.6; rows cut at halves of blocks, so that 32 tokens are 128 programs of five
halves each, 18.6 where two or three whole blocks take 18.8, while a producer written so takes all others 8% longer.

Between projections, when it was 91 KB and normed queries, in thousands of cycles from the start of a program of 128
keys: queries are there at 5 and normed at 11, keys at 10 and 14, both blocks done at 23, sums handed over at 28, rows
stored at 36; back to back the last three are 21, 23 and 29. Not shorter for: queries asked for before a token's lengths
are known, the sink and the angles of rows loaded early. The last block in the loop, not behind it, is 7 KB less code
and 1.4 us there, but 0.8 more for 640 keys and 3 to 6 for 512 tokens.

No producer at all, 46.4 us: keys lie in shared memory as they are stored, 128 of them while 128 more are copied, and
are the side of both products that comes from registers, so that eight warps dequantise each code twice and write none.
With 255 registers and none spilled, two warps for each scheduler leave two of three of its slots empty.

Sparse MLA decode on Hopper: which calls sparse_mla_decode_kernel_hopper.py takes, and how it is launched.
"""

from __future__ import annotations

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

from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..host.gpu import Gpu
from ..host.pdl import pdl_option
from .kv_load_sm90 import ask_for_block, find_keys, place_keys, produce_keys, row_length
from .output_epilogue_sm90 import BLOCK_H, HALF, SWIZZLED, D, fetch_angles, store_part, store_rows
from .query_prologue_sm90 import fetch_queries, norm_factors, put_queries, queries_of, turn_queries, turning_of
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source
from .sparse_mla_decode_sm90_few_heads import MOST_HEADS
from .sparse_mla_decode_sm90_launch import gather_refuses, launch_gathering
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

KEYS = 64

BLOCK_N = gl.constexpr(KEYS)
BUFFERS = gl.constexpr(2)
AHEAD = gl.constexpr(4)  # blocks from the one that is multiplied to the one whose keys are found
PLACES = gl.constexpr(8)  # of blocks whose keys are found, fetched or scored: a power of two, more than AHEAD + 1
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)

SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF.value, 16]))

QUERIES = gl.constexpr(queries_of(BLOCK_H.value))


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
def _softmax(scores, live, acc, top, sums, number, scale, scales, weights_tile, factors, weights_ready, weights_free):
    """Weights of block `number` into shared memory for both consumers, and the sums so far rescaled."""
    if scales is not None:  # of each head, in shared memory: in registers they would be spilled
        scale = gl.expand_dims(scales.load(gl.SliceLayout(1, SCORES)), 1)
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
    p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_lse, p_scale, tokens, padded_tokens, token,
    head, heads, scale, blocks, q_tile, keys, weights_tile, factors, shares, lives,
    ready, free, weights_ready, weights_free, q_ready, SPLIT: gl.constexpr, ROPE: gl.constexpr,
    PARTIAL: gl.constexpr, INVERSE: gl.constexpr, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, softmax, the left half of the output."""
    if eps is not None:
        turning = fetch_queries(p_q, q_head_stride, heads, BLOCK_H, PARTIAL, QUERIES, 0, turning_of(BLOCK_H, ROPE))
        cos, sin = fetch_angles(p_table, turning, ROPE)
    put_queries(p_q, q_head_stride, q_tile, heads, 0, BLOCK_H // 2, PARTIAL)
    if eps is not None:
        turning = turn_queries(turning, cos, sin, ROPE)
    mbarrier.wait(q_ready, 0)
    scales = None if eps is None else shares
    if eps is not None:
        shares.store(norm_factors(q_tile, turning, eps, SCORES) * scale)
        fence_async_shared()
        thread_barrier()
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
                scores, live, acc, top, sums, number, scale, scales, weights_tile, factors, weights_ready, weights_free
            )
            acc = warpgroup_mma(weights_tile, keys.index(buffer).slice(0, HALF, 1), acc, is_async=True)
            mbarrier.wait(ready.index(following), ((number + 1) // BUFFERS) & 1)
            scores = _scores(q_tile, keys.index(following))
            live = lives.index((number + 1) % PLACES).load(gl.SliceLayout(0, SCORES))
            acc = warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()
            mbarrier.arrive(free.index(buffer), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, sums = _softmax(
            scores, live, acc, top, sums, blocks - 1, scale, scales, weights_tile, factors, weights_ready, weights_free
        )
        last = keys.index((blocks - 1) % BUFFERS).slice(0, HALF, 1)
        acc = warpgroup_mma(weights_tile, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    o_head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    shift = gl.where(top == float("-inf"), 0.0, top)
    lse = gl.where(total == 0, float("-inf"), shift + gl.log2(total))
    factor = gl.where(total == 0, 0.0, 1.0 / total)
    mbarrier.wait(weights_free, (blocks & 1) ^ 1)
    factors.store(factor)
    if SPLIT:
        gl.store(p_lse + o_head, lse, mask=o_head < heads)
    else:
        if p_lse is not None:
            gl.store(p_lse + o_head, gl.where(total == 0, float("inf"), lse * LN_2), mask=o_head < heads)
        if p_sink is not None:
            # As a row of one part is joined, so that it gives the same bits.
            share = 1.0 / (
                1.0
                + gl.exp2(
                    gl.load(p_sink + o_head, mask=o_head < heads, other=0.0) * LOG2_E - gl.where(total == 0, 0.0, lse)
                )
            )
            shares.store(share)
    thread_barrier()
    mbarrier.arrive(weights_ready, count=1)
    if SPLIT:
        if blocks > 0:
            by_row = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))
            store_part(acc, by_row, q_tile, p_out, p_scale, heads, 0, PARTIAL)
    else:
        store_rows(
            acc, (factors, None if p_sink is None else shares), keys.index(0), p_out, out_head_stride, p_scale, tokens,
            padded_tokens, token, head, heads, p_table, 0, ROPE, PARTIAL, INVERSE, GROUPS, GROUP_HEADS, PACKED,
        )  # fmt: skip


@gluon.jit
def _right(
    p_words0, chunks0, p_indices0, stride0, length0, capacity0, p_words1, chunks1, p_indices1, stride1, length1,
    capacity1, boundary, begin, rows, scales, lives, placed,
    p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head,
    heads, blocks, q_tile, keys, weights_tile, factors, shares,
    ready, free, weights_ready, weights_free, q_ready, LOG_PAGE0: gl.constexpr, LOG_PAGE1: gl.constexpr,
    SPLIT: gl.constexpr, ROPE: gl.constexpr, PARTIAL: gl.constexpr, INVERSE: gl.constexpr, GROUPS: gl.constexpr,
    GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: where keys are, and the right half of the output."""
    source0 = p_words0, chunks0, LOG_PAGE0, p_indices0, stride0, length0, capacity0
    source1 = p_words1, chunks1, LOG_PAGE1, p_indices1, stride1, length1, capacity1
    FIRST: gl.constexpr = AHEAD * BLOCK_N
    ALL: gl.constexpr = PLACES * BLOCK_N
    slot = find_keys(source0, source1, token, boundary, begin, FIRST, BLOCK_N)
    place_keys(
        source0, source1, boundary, begin, slot, reinterpret(rows, gl.int64, [ALL], FLAT).slice(0, FIRST),
        reinterpret(scales, gl.int64, [ALL], FLAT).slice(0, FIRST),
        reinterpret(lives, gl.float32, [ALL], FLAT).slice(0, FIRST), BLOCK_N,
    )  # fmt: skip
    thread_barrier()
    mbarrier.arrive(placed, count=1)
    put_queries(p_q, q_head_stride, q_tile, heads, BLOCK_H // 2, BLOCK_H // 2, PARTIAL)
    mbarrier.arrive(q_ready, count=1)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
    slot = find_keys(source0, source1, token, boundary, begin + AHEAD, BLOCK_N, BLOCK_N)
    for number in range(blocks):
        buffer = number % BUFFERS
        mbarrier.wait(ready.index(buffer), (number // BUFFERS) & 1)
        mbarrier.wait(weights_ready, number & 1)
        acc = acc * gl.expand_dims(factors.load(gl.SliceLayout(1, OUTPUT)), 1)
        acc = warpgroup_mma(weights_tile, keys.index(buffer).slice(HALF, HALF, 1), acc, is_async=True)
        asked, place = number + AHEAD - 1, (number + AHEAD - 1) % PLACES
        if asked < blocks:
            ask_for_block(source0, source1, boundary, begin + asked, rows.index(place), scales.index(place))
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(weights_free, count=1)
        mbarrier.arrive(free.index(buffer), count=1)
        ahead = number + AHEAD
        place = ahead % PLACES
        place_keys(
            source0, source1, boundary, begin + ahead, slot, rows.index(place), scales.index(place), lives.index(place),
            BLOCK_N,
        )  # fmt: skip
        slot = find_keys(source0, source1, token, boundary, begin + ahead + 1, BLOCK_N, BLOCK_N)
    mbarrier.wait(weights_ready, blocks & 1)
    if SPLIT:
        if blocks > 0:
            by_row = factors.load(gl.SliceLayout(1, OUTPUT))
            store_part(acc, by_row, q_tile, p_out, p_scale, heads, HALF, PARTIAL)
    else:
        store_rows(
            acc, (factors, None if p_sink is None else shares), keys.index(1), p_out, out_head_stride, p_scale, tokens,
            padded_tokens, token, head, heads, p_table, HALF, ROPE, PARTIAL, INVERSE, GROUPS, GROUP_HEADS, PACKED,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "splits", "least", "first", "tokens", "padded_tokens", "max_pos", "width0", "width1", "capacity0", "capacity1",
    ],
    # A piece of a batch begins anywhere.
    do_not_specialize_on_alignment=["p_lens0", "p_lens1", "p_positions"],
)  # fmt: skip
def sparse_mla_decode_hopper_kernel(
    p_out,  # [T, H, 512] bfloat16 or e4m3 [GROUPS, T, K]; or parts [N, splits, H, 512], contiguous
    p_lse,  # [T, H] float32, neighbouring heads, or None; or parts [N, splits, H] in base 2, contiguous
    p_scale,  # of e4m3, see attention_rows_hopper.store_rows; or of float16 parts [N, splits, H, 2] float32
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
    LOG_PAGE0: gl.constexpr,  # of the tokens in a page
    LOG_PAGE1: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
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
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    shares = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    rows = gl.allocate_shared_memory(gl.int64, [PLACES, BLOCK_N], FLAT)
    scales = gl.allocate_shared_memory(gl.int64, [PLACES, BLOCK_N], FLAT)
    lives = gl.allocate_shared_memory(gl.float32, [PLACES, BLOCK_N], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    placed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(weights_ready, count=1)
    mbarrier.init(weights_free, count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(placed, count=1)
    gdc_launch_dependents()
    gdc_wait()
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    part = gl.program_id(0) // HEAD_BLOCKS
    head = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    heads = H - head
    token = (first + part // splits).to(gl.int64)
    length0 = row_length(p_lens0, lens0_stride, token, width0)
    length1 = row_length(p_lens1, lens1_stride, token, width1)
    if p_positions is not None:
        position = gl.load(p_positions + token * position_stride).to(gl.int64)
        p_table += gl.minimum(gl.maximum(position, 0), max_pos - 1) * table_stride
    blocks0 = (length0 + BLOCK_N - 1) // BLOCK_N
    blocks = blocks0 + (length1 + BLOCK_N - 1) // BLOCK_N
    # The programs of a token beyond its parts have nothing to do.
    parts = gl.maximum(gl.minimum(splits, (blocks + least - 1) // least), 1)
    begin = blocks * gl.minimum(part % splits, parts) // parts
    end = blocks * gl.minimum(part % splits + 1, parts) // parts
    # Where the second cache begins: nowhere if it is not wanted, for then it may have no pages.
    boundary = gl.where(end <= blocks0, 2**30, blocks0)
    p_q += token * q_token_stride + head.to(gl.int64) * q_head_stride
    if p_sink is not None:
        p_sink += head
    if SPLIT:
        row = part.to(gl.int64) * H + head
        p_out += row * D
        p_lse += row
        if p_scale is not None:
            p_scale += row * (D // HALF)
    else:
        if GROUPS == 0:
            p_out += token * out_token_stride + head.to(gl.int64) * out_head_stride
        if p_lse is not None:
            p_lse += token * lse_stride + head
    gl.warp_specialize([
        (_left, (p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_lse, p_scale, tokens,
                 padded_tokens, token, head, heads, scale, end - begin, q_tile, keys, weights_tile, factors, shares,
                 lives, ready, free, weights_ready, weights_free, q_ready, SPLIT, ROPE, PARTIAL, INVERSE,
                 GROUPS, GROUP_HEADS, PACKED)),
        (_right, (p_words0, page_chunks0, p_indices0, indices0_stride, length0, capacity0, p_words1, page_chunks1,
                  p_indices1, indices1_stride, length1, capacity1, boundary, begin, rows, scales, lives, placed,
                  p_q, q_head_stride, p_table, eps, p_sink, p_out, out_head_stride, p_scale, tokens, padded_tokens,
                  token, head, heads, end - begin, q_tile, keys, weights_tile, factors, shares, ready, free,
                  weights_ready, weights_free, q_ready, LOG_PAGE0, LOG_PAGE1, SPLIT, ROPE, PARTIAL, INVERSE, GROUPS,
                  GROUP_HEADS, PACKED)),
        (produce_keys, (p_words0, p_words1, boundary, begin, end, rows, scales, lives, placed, keys, ready, free,
                        WIDE)),
    ], [4, 4], [RIGHT_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


HEADS = BLOCK_H.value
FEWEST_HEADS = MOST_HEADS + 1  # fewer have a kernel of their own
# H200, 64 heads, 128 / 512 tokens of 640 keys: 38.2 / 142 us (`dsv4 bench sparse_mla_decode`); 4% more with 136
RIGHT_REGISTERS, PRODUCER_REGISTERS = 160, 144
WIDE = True


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if q.shape[1] < FEWEST_HEADS:
        return f"it takes {FEWEST_HEADS} heads or more"
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
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel."""
    constants = {"RIGHT_REGISTERS": RIGHT_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS, "WIDE": WIDE}
    return launch_gathering(
        sparse_mla_decode_hopper_kernel,
        HEADS,
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
        packs=True,
    )
