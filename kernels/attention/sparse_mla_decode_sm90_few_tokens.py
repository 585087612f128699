"""Sparse MLA decode of few tokens on Hopper, in Gluon: `fp8_ds_mla` caches, bfloat16 queries, small blocks of heads.

With few tokens time is what one program waits for, one thing after the other: the kernel in front, lengths, slots,
keys, and its own instructions. So all warps do everything, and there are many programs, each with little to do. Its
code is a quarter of that of the kernels with specialised warps: in a row of layers other kernels take the instruction
cache, and a warp of those then waits 5.5 of its 9.5 cycles for each instruction for the instruction itself, one of this
kernel 0.2 of 6. The kernel starts before the one in front has ended, and asks the L2 cache for its keys meanwhile.

Keys are the rows of both products and heads their columns. A program takes a block of heads of one token and its share
of the blocks of the token's keys, window cache first.

Tried on an H200 without gain: attending once for nothing before the kernel in front has ended, so that code and keys
are near (2 to 10 us more); parts joined by the last program of a tile (2 to 7 us more than a second launch), or by the
programs of a cluster in their shared memory (0.4 to 2 us more); two programs of 128 registers on a processor (3 to 5 us
more); programs of 4 warps with one block of 64 keys, which take 1 us less for one token, but 1 us more where two come
to lie on one processor; keys asked for before the loop, and the next ones while products run, which takes more code and
registers (1 to 2 us more); keys read from the slots of before the wait, and again where these have changed; all loads
of keys on their way before the first is waited for, two rounds of memory less (0.2 to 0.8 us more a layer).

Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...layout import cdiv
from ..hopper.gluon import reinterpret, thread_barrier
from ..host.gpu import Gpu
from ..host.pdl import pdl_option
from .kv_load_sm90 import SWIZZLED_WORDS, angles, ask, ask_for_keys, dequantize_keys, extent, fetch_keys, slots
from .output_epilogue_sm90 import HALF, SWIZZLED, D, fetch_angles, store_half
from .query_prologue_sm90 import fetch_queries, put_few_queries
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source, part_count
from .sparse_mla_decode_sm90 import FEWEST_HEADS
from .sparse_mla_decode_sm90_launch import gather_refuses, launch_gathering
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E

LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)


@gluon.jit
def _finite(top):
    """Largest scores to subtract from scores: -inf - -inf is NaN, so a head without keys so far is shifted by zero."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _share(total):
    """Factor that makes a sum of weighted values the output of a part; 0 without keys."""
    return gl.where(total == 0, 0.0, 1.0 / total)


@gluon.jit
def _scores(keys, q_tile, live, scale, SCORES: gl.constexpr):
    """Scores of a block of keys, -inf for what is none."""
    BLOCK_N: gl.constexpr = keys.shape[0]
    BLOCK_H: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    scores = warpgroup_mma(keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return gl.where(gl.expand_dims(live, 1) >= 0, scores * scale, float("-inf"))


@gluon.jit(
    do_not_specialize=[
        "splits", "least", "first", "tokens", "padded_tokens", "max_pos", "capacity0", "capacity1", "width0", "width1",
    ],
    # A piece of a batch begins anywhere.
    do_not_specialize_on_alignment=["p_lens0", "p_lens1", "p_positions"],
)  # fmt: skip
def sparse_mla_decode_small_hopper_kernel(
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
    least,  # 1
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
    BLOCK_N: gl.constexpr,
    LOG_PAGE0: gl.constexpr,  # of the tokens in a page
    LOG_PAGE1: gl.constexpr,
    WIDE: gl.constexpr,
    ONE: gl.constexpr,  # no program has more than one block
    LATE: gl.constexpr,  # the next kernel starts when the last keys are here, else at once
    SPLIT: gl.constexpr,
    ROPE: gl.constexpr,
    INVERSE: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP_HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program (h, p, t) attends head block h of token t to the blocks of keys p, p + splits, and so on."""
    SIDES: gl.constexpr = 16 * num_warps // BLOCK_N  # groups of warps that share the heads of the scores
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps // SIDES, SIDES], instr_shape=[16, BLOCK_H // SIDES, 16]
    )
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_H, 16]
    )
    SCORE_HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUTPUT_HEADS: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [num_warps, 1, 1], [2, 1, 0])
    SLOTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))
    ROPES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [num_warps, 1], [1, 0])
    ASKED: gl.constexpr = gl.SliceLayout(1, LINES)
    LIVE: gl.constexpr = gl.SliceLayout(1, SCORES)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    if LATE == 0:
        gdc_launch_dependents()
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, D], SWIZZLED)
    words = reinterpret(keys, gl.int32, [BLOCK_N, HALF], SWIZZLED_WORDS)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    head, part, local = gl.program_id(0) * BLOCK_H, gl.program_id(1), gl.program_id(2)
    heads = H - head
    token = (first + local).to(gl.int64)
    p_q += token * q_token_stride + head.to(gl.int64) * q_head_stride
    p_row0 = p_indices0 + token * indices0_stride
    p_row1 = p_indices1 + token * indices1_stride
    o_head = gl.arange(0, BLOCK_H, SCORE_HEADS)
    m_head = o_head < heads
    # Before the kernel in front has ended: the keys of this step but its own are on their way to the L2 cache, as far
    # as the metadata, which is read again, is the step's already.
    length0, length1, blocks0, blocks = extent(
        p_lens0, lens0_stride, p_lens1, lens1_stride, width0, width1, token, BLOCK_N
    )
    if p_positions is not None:
        p_angles = angles(p_positions, position_stride, p_table, table_stride, max_pos, token)
        ask(p_angles + gl.arange(0, ROPE, LINE))
    for block in range(part, blocks, splits):
        inner = block < blocks0
        slot = slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, block, BLOCK_N, ASKED)
        ask_for_keys(
            gl.where(inner, p_words0, p_words1), gl.where(inner, page_chunks0, page_chunks1), slot,
            gl.where(inner, LOG_PAGE0, LOG_PAGE1), LINES,
        )  # fmt: skip
    gdc_wait()
    q = fetch_queries(p_q, q_head_stride, heads, BLOCK_H, PARTIAL, ROWS, CACHE=".cg")
    length0, length1, blocks0, blocks = extent(
        p_lens0, lens0_stride, p_lens1, lens1_stride, width0, width1, token, BLOCK_N
    )
    p_cos = p_table
    if p_positions is not None:
        p_cos = angles(p_positions, position_stride, p_table, table_stride, max_pos, token)
    cos, sin = None, None
    if eps is not None:
        # On their way together with the keys, not one after the other when queries are there.
        cos, sin = fetch_angles(p_cos, q, ROPE, ".cg")
    slot = slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, part, BLOCK_N, SLOTS)
    live = slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, part, BLOCK_N, LIVE)
    acc = gl.zeros([D, BLOCK_H], gl.float32, OUTPUT)
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, SCORE_HEADS)
    if ONE:
        # The loop below without what passes from block to block: half of the registers, and code that is shorter.
        total = gl.zeros([BLOCK_H], gl.float32, SCORE_HEADS)
        share = gl.zeros([BLOCK_H], gl.float32, OUTPUT_HEADS)
        if part < blocks:
            inner = part < blocks0
            codes, rope, scales = fetch_keys(
                gl.where(inner, p_words0, p_words1), gl.where(inner, page_chunks0, page_chunks1), slot,
                gl.where(inner, LOG_PAGE0, LOG_PAGE1), WORDS, ROPES, ".cg",
            )  # fmt: skip
            put_few_queries(q, cos, sin, eps, q_tile, ROPE)
            words.store(dequantize_keys(codes, rope, scales, slot >= 0, WIDE, WORDS))
            if LATE:
                gdc_launch_dependents()
            fence_async_shared()
            thread_barrier()
            scores = _scores(keys, q_tile, live, scale, SCORES)
            top = gl.max(scores, 0)
            weights = gl.exp2(scores - gl.expand_dims(_finite(top), 0))
            weights_tile.store(weights.to(gl.bfloat16).permute((1, 0)))
            fence_async_shared()
            thread_barrier()
            acc = warpgroup_mma(keys.permute((1, 0)), weights_tile.permute((1, 0)), acc, use_acc=False, is_async=True)
            # While the values are added, so are the weights.
            total = gl.sum(weights, 0)
            share = gl.convert_layout(_share(total), OUTPUT_HEADS)
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
    else:
        sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
        for block in range(part, blocks, splits):
            inner = block < blocks0
            codes, rope, scales = fetch_keys(
                gl.where(inner, p_words0, p_words1), gl.where(inner, page_chunks0, page_chunks1), slot,
                gl.where(inner, LOG_PAGE0, LOG_PAGE1), WORDS, ROPES, ".cg",
            )  # fmt: skip
            if block == part:
                # Queries are normed while the first keys are on their way.
                put_few_queries(q, cos, sin, eps, q_tile, ROPE)
            words.store(dequantize_keys(codes, rope, scales, slot >= 0, WIDE, WORDS))
            following = block + splits
            if LATE and following >= blocks:
                # The weight of the projection behind no longer holds up the keys.
                gdc_launch_dependents()
            here = live
            slot = slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, following, BLOCK_N, SLOTS)
            live = slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, following, BLOCK_N, LIVE)
            fence_async_shared()
            thread_barrier()
            scores = _scores(keys, q_tile, here, scale, SCORES)
            new_top = gl.maximum(top, gl.max(scores, 0))
            shift = _finite(new_top)
            rescale = gl.exp2(top - shift)
            weights = gl.exp2(scores - gl.expand_dims(shift, 0))
            weights_tile.store(weights.to(gl.bfloat16).permute((1, 0)))
            sums = sums * gl.expand_dims(rescale, 0) + weights
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, OUTPUT_HEADS), 0)
            top = new_top
            fence_async_shared()
            thread_barrier()
            acc = warpgroup_mma(keys.permute((1, 0)), weights_tile.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
        total = gl.sum(sums, 0)
        share = gl.convert_layout(_share(total), OUTPUT_HEADS)

    lse = gl.where(total == 0, float("-inf"), _finite(top) + gl.log2(total))
    acc = acc * gl.expand_dims(share, 0)
    if SPLIT:
        row = (local * splits + part).to(gl.int64) * H + head
        gl.store(p_lse + row + o_head, lse, mask=m_head)
        if part < blocks:
            o_column = gl.expand_dims(gl.arange(0, BLOCK_H, OUTPUT_HEADS), 0)
            o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, OUTPUT)), 1)
            p_part = p_out + row * D + (o_column * D + o_dim)
            if PARTIAL:
                gl.store(p_part, acc, mask=(o_column < heads) & (o_dim >= 0))
            else:
                gl.store(p_part, acc)
    else:
        if p_lse is not None:
            natural = gl.where(total == 0, float("inf"), lse * LN_2)
            gl.store(p_lse + token * lse_stride + head + o_head, natural, mask=m_head)
        if p_sink is not None:
            # As a row of one part is joined, so that it gives the same bits.
            sink = gl.load(p_sink + head + o_head, mask=m_head, other=0.0)
            kept = 1.0 / (1.0 + gl.exp2(sink * LOG2_E - gl.where(total == 0, 0.0, lse)))
            acc = acc * gl.expand_dims(gl.convert_layout(kept, OUTPUT_HEADS), 0)
        q_tile.store(acc.to(gl.bfloat16).permute((1, 0)))
        thread_barrier()
        if GROUPS == 0:
            p_out += token * out_token_stride + head.to(gl.int64) * out_head_stride
        for side in gl.static_range(D // HALF):
            store_half(
                q_tile, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, p_cos,
                side * HALF, ROPE, PARTIAL, INVERSE, GROUPS, GROUP_HEADS, PACKED, ROWS,
            )  # fmt: skip


WIDE = True


class Shape(NamedTuple):
    """Of a program: heads and keys that it takes at a time, its warps, and when it lets the next kernel start.

    That is when its last keys are here where `late`, so that the weight of a projection does not hold them up; else at
    once. `once`: it has code of its own for rows that are cut into single blocks.
    """

    block_h: int
    block_n: int
    warps: int
    late: bool = False
    once: bool = False


NARROW = Shape(16, 64, 8)
ONCE = Shape(16, 128, 8, late=True, once=True), Shape(32, 128, 8, late=True, once=True)
MOST_PROGRAMS = 132
"""Of a call whose rows are cut into single blocks: one for each multiprocessor of an H200."""
TILE = 16
SHORT = 256
"""Most keys of a row that is short."""
MOST_TILES, FEWEST_TILES = 256, 4
"""Of rows that are short."""


def shape_of(tokens: int, heads: int, keys: int) -> Shape | None:
    """How to attend rows of at most `keys` keys; None for more than this kernel does well.

    What attention adds to a row of e4m3 projections of V4-Flash, in us on an H200, by NARROW programs, by ONCE, and
    by the kernel for more tokens (`examples/benchmarks/attention_between_projections.py`); between bfloat16
    projections the order is the same:

        tokens  128 keys             256 keys             640 keys
             1   7.4  7.7  9.1 14.9   7.9  8.5  9.9 14.5   8.1  8.7 10.5 15.0
             8   8.0  7.2  8.8 13.3  10.6  9.3 10.8 13.9  16.0 15.0 12.8 17.2
            16  10.0  7.2  8.8 14.1  13.2 10.4 11.9 15.8  23.7 21.3 20.3 18.9
            32   9.8  8.6  8.6 14.4  16.6 14.5 14.8 17.9  37.8 31.4 28.8 21.5
            64  19.5 16.7 11.2 21.1  33.5 28.4 19.5 24.0  76.4 62.1 41.5 30.7
           128  38.4 32.0 20.5 18.3  67.3 55.3 37.3 23.6

    Programs of 16 warps, or of 32 heads and 64 keys, without code of their own for single blocks, are nowhere faster.
    """
    tiles = tokens * cdiv(heads, TILE)
    if keys <= SHORT:
        if tiles <= FEWEST_TILES and keys > ONCE[0].block_n:
            return NARROW
        return ONCE[0] if tiles <= MOST_TILES // 2 else ONCE[1] if tiles <= MOST_TILES else None
    for shape in (NARROW, *ONCE):
        # Where every block of a row has a program, and every program a multiprocessor, none waits for keys twice.
        if tokens * cdiv(heads, shape.block_h) * cdiv(keys, shape.block_n) <= MOST_PROGRAMS:
            return shape
    return None


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    tokens, heads, _ = q.shape
    keys = window.indices.shape[1] + extra.indices.shape[1]
    if heads < FEWEST_HEADS:
        return f"it takes {FEWEST_HEADS} heads or more"
    if shape_of(tokens, heads, keys) is None:
        return f"it takes less than {tokens} tokens with {heads} heads and {keys} keys each"
    if fusion.batch_invariant:
        return "its sums are not those of the kernels for more tokens"
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
    tokens, heads, _ = q.shape
    widths = window.indices.shape[1], extra.indices.shape[1]
    block_h, block_n, warps, late, once = shape or shape_of(tokens, heads, sum(widths)) or ONCE[1]
    blocks = sum(cdiv(width, block_n) for width in widths)
    splits = splits or part_count(max(1, tokens * cdiv(heads, block_h)), blocks, gpu)
    constants = {"BLOCK_H": block_h, "BLOCK_N": block_n, "WIDE": WIDE, "ONE": once and splits >= blocks, "LATE": late}
    return launch_gathering(
        sparse_mla_decode_small_hopper_kernel,
        block_h,
        block_n,
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
        warps,
        flat=False,
    )
