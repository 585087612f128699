"""Sparse MLA decode of few tokens on sm_90, in Gluon: `fp8_ds_mla` or bfloat16 caches, small blocks of heads.

With few tokens, a chain of latencies decides: the previous kernel, lengths, slots, keys, and instruction fetch. So all
warps do all of the work, and there are many programs with little to do each. The code is a quarter of that of the
warp-specialised kernels, because in a layer it is fetched from memory. The kernel starts before the previous one ends
(PDL) and prefetches its keys into L2 meanwhile.

Keys are the rows of both GEMMs and heads their columns. A program takes a block of heads of one token, and every
`splits`-th block of the token's keys, window cache first.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...layout import cdiv
from ...ops.common.invariance import TOKENS
from ..hopper.gluon import reinterpret, thread_barrier
from ..host.gpu import Gpu
from .common import CHANGING, DecodeCall, Outputs
from .kv_load_sm90 import (
    SWIZZLED_WORDS,
    KeyRow,
    address_of,
    block_slots,
    copy_rows,
    dequantize_keys,
    fetch_keys,
    prefetch,
    prefetch_rows,
    row_extents,
)
from .prologue_epilogue_sm90 import (
    HALF,
    SWIZZLED,
    D,
    HeadRows,
    angle_pointer,
    fetch_angles,
    fetch_queries,
    store_few_queries,
    store_half,
)
from .sparse_mla_decode_sm90 import MIN_HEADS, Variant, launch_variant, why_unsupported_sm90
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E
from .split_combine import split_count

LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)


@gluon.jit
def _finite(top):
    """Return the largest scores to subtract: -inf - -inf is NaN, so a head without keys so far is shifted by zero."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _inverse(total):
    """Return the factor that turns a sum of weighted values into an output; 0 without keys."""
    return gl.where(total == 0, 0.0, 1.0 / total)


@gluon.jit
def _scores(keys, q_tile, live, scale, SCORES: gl.constexpr):
    """Return the scores of a block of keys, -inf for invalid slots."""
    BLOCK_N: gl.constexpr = keys.shape[0]
    BLOCK_H: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    scores = warpgroup_mma(keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return gl.where(gl.expand_dims(live, 1) >= 0, scores * scale, float("-inf"))


@gluon.jit
def _fetch_block(
    inner, window, extra, slot, words,
    WORDS: gl.constexpr, ROPES: gl.constexpr, COPIES: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """Start to load the keys `slot` of a block that belongs to the window if `inner`, else to the extra cache.

    Returns what `_store_block` takes. PLAIN keys are copied to `words`, in shared memory.
    """
    p_words = gl.where(inner, window.p_words, extra.p_words)
    chunks = gl.where(inner, window.page_chunks, extra.page_chunks)
    log_page = gl.where(inner, window.log_page, extra.log_page)
    stored = None
    if PLAIN:
        row, _ = address_of(slot, chunks, log_page, True)
        copy_rows(words, p_words, row, slot >= 0, COPIES)
        async_copy.commit_group()
    else:
        stored = fetch_keys(p_words, chunks, slot, log_page, WORDS, ROPES, ".cg")
    return stored


@gluon.jit
def _store_block(stored, slot, words, WORDS: gl.constexpr, PLAIN: gl.constexpr):
    """Store the keys of a block to `words`, or wait for their copies."""
    if PLAIN:
        async_copy.wait_group(0)
    else:
        codes, rope, scales = stored
        words.store(dequantize_keys(codes, rope, scales, slot >= 0, WORDS))


@gluon.jit(**CHANGING)
def sparse_mla_decode_sm90_few_tokens_kernel(
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
    min_blocks,  # 1
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
    """Attend head block h of token t to the blocks of keys p, p + splits, ... in program (h, p, t)."""
    H: gl.constexpr = SHAPE.heads
    PLAIN: gl.constexpr = SHAPE.plain
    WINDOW_LOG_PAGE: gl.constexpr = SHAPE.window_log_page
    EXTRA_LOG_PAGE: gl.constexpr = SHAPE.extra_log_page
    BLOCK_H: gl.constexpr = TILING.block_h
    BLOCK_N: gl.constexpr = TILING.block_n
    LATE: gl.constexpr = TILING.late
    num_warps: gl.constexpr = TILING.warps
    SIDES: gl.constexpr = 16 * num_warps // BLOCK_N  # groups of warps, each with a part of the heads of the scores
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps // SIDES, SIDES], instr_shape=[16, BLOCK_H // SIDES, 16]
    )
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_H, 16]
    )
    SCORE_HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUTPUT_HEADS: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [num_warps, 1, 1], [2, 1, 0])
    COPIES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    SLOTS: gl.constexpr = gl.SliceLayout(1, COPIES) if PLAIN else gl.SliceLayout(1, gl.SliceLayout(2, WORDS))
    ROPES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [num_warps, 1], [1, 0])
    PREFETCHED: gl.constexpr = gl.SliceLayout(1, LINES)
    LIVE: gl.constexpr = gl.SliceLayout(1, SCORES)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    if LATE == 0:
        gdc_launch_dependents()
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, D], SWIZZLED)
    words = reinterpret(keys, gl.int32, [BLOCK_N, HALF], SWIZZLED_WORDS)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    head, split, local = gl.program_id(0) * BLOCK_H, gl.program_id(1), gl.program_id(2)
    heads = H - head
    token = (first_token + local).to(gl.int64)
    p_out, p_lse, p_scale = outputs
    p_window_words, p_window_indices = window
    p_extra_words, p_extra_indices = extra
    p_q += token * strides.q_token + head.to(gl.int64) * strides.q_head
    p_window_row = p_window_indices + token * strides.window_indices
    p_extra_row = p_extra_indices + token * strides.extra_indices
    p_lens = p_window_lens, p_extra_lens
    lens_strides = strides.window_lens, strides.extra_lens
    widths = window_width, extra_width
    o_head = gl.arange(0, BLOCK_H, SCORE_HEADS)
    m_head = o_head < heads
    # Before the previous kernel has ended: all keys but the step's own are prefetched, as far as the metadata, which is
    # loaded again below, is the step's already.
    window_length, extra_length, window_blocks, blocks = row_extents(p_lens, lens_strides, widths, token, BLOCK_N)
    if p_positions is not None:
        p_angles = angle_pointer(p_positions, p_table, strides, max_pos, token, ".cg")
        prefetch(p_angles + gl.arange(0, EPILOGUE.rope, LINE))
    window = KeyRow(p_window_words, strides.window_page, p_window_row, window_length, window_capacity, WINDOW_LOG_PAGE)
    extra = KeyRow(p_extra_words, strides.extra_page, p_extra_row, extra_length, extra_capacity, EXTRA_LOG_PAGE)
    for block in range(split, blocks, splits):
        inner = block < window_blocks
        slot = block_slots(window, extra, window_blocks, block, BLOCK_N, PREFETCHED)
        p_words = gl.where(inner, window.p_words, extra.p_words)
        chunks = gl.where(inner, window.page_chunks, extra.page_chunks)
        row, scale_row = address_of(slot, chunks, gl.where(inner, window.log_page, extra.log_page), PLAIN)
        prefetch_rows(p_words, row, scale_row, LINES, PLAIN)
    gdc_wait()
    q = fetch_queries(p_q, strides.q_head, heads, BLOCK_H, PARTIAL, ROWS, CACHE=".cg")
    window_length, extra_length, window_blocks, blocks = row_extents(p_lens, lens_strides, widths, token, BLOCK_N)
    p_cos = p_table
    if p_positions is not None:
        p_cos = angle_pointer(p_positions, p_table, strides, max_pos, token, ".cg")
    cos, sin = None, None
    if eps is not None:
        # Before the keys, so that both are in flight at the same time.
        cos, sin = fetch_angles(p_cos, q, EPILOGUE.rope, ".cg")
    window = KeyRow(p_window_words, strides.window_page, p_window_row, window_length, window_capacity, WINDOW_LOG_PAGE)
    extra = KeyRow(p_extra_words, strides.extra_page, p_extra_row, extra_length, extra_capacity, EXTRA_LOG_PAGE)
    slot = block_slots(window, extra, window_blocks, split, BLOCK_N, SLOTS)
    live = block_slots(window, extra, window_blocks, split, BLOCK_N, LIVE)
    acc = gl.zeros([D, BLOCK_H], gl.float32, OUTPUT)
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, SCORE_HEADS)
    if TILING.one_block:
        # The loop below without what passes from block to block: half of the registers, and shorter code.
        total = gl.zeros([BLOCK_H], gl.float32, SCORE_HEADS)
        factor = gl.zeros([BLOCK_H], gl.float32, OUTPUT_HEADS)
        if split < blocks:
            inner = split < window_blocks
            stored = _fetch_block(inner, window, extra, slot, words, WORDS, ROPES, COPIES, PLAIN)
            store_few_queries(q, cos, sin, eps, q_tile, EPILOGUE.rope)
            _store_block(stored, slot, words, WORDS, PLAIN)
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
            # The weights are added while the GEMM runs.
            total = gl.sum(weights, 0)
            factor = gl.convert_layout(_inverse(total), OUTPUT_HEADS)
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
    else:
        sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
        for block in range(split, blocks, splits):
            inner = block < window_blocks
            stored = _fetch_block(inner, window, extra, slot, words, WORDS, ROPES, COPIES, PLAIN)
            if block == split:
                # Queries are normed while the first keys are in flight.
                store_few_queries(q, cos, sin, eps, q_tile, EPILOGUE.rope)
            _store_block(stored, slot, words, WORDS, PLAIN)
            following = block + splits
            if LATE and following >= blocks:
                # From here on, the next kernel's weight prefetch no longer delays the keys.
                gdc_launch_dependents()
            here = live
            slot = block_slots(window, extra, window_blocks, following, BLOCK_N, SLOTS)
            live = block_slots(window, extra, window_blocks, following, BLOCK_N, LIVE)
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
        factor = gl.convert_layout(_inverse(total), OUTPUT_HEADS)

    lse = gl.where(total == 0, float("-inf"), _finite(top) + gl.log2(total))
    acc = acc * gl.expand_dims(factor, 0)
    if EPILOGUE.split:
        row = (local * splits + split).to(gl.int64) * H + head
        gl.store(p_lse + row + o_head, lse, mask=m_head)
        if split < blocks:
            o_column = gl.expand_dims(gl.arange(0, BLOCK_H, OUTPUT_HEADS), 0)
            o_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, OUTPUT)), 1)
            p_partial = p_out + row * D + (o_column * D + o_dim)
            if PARTIAL:
                gl.store(p_partial, acc, mask=(o_column < heads) & (o_dim >= 0))
            else:
                gl.store(p_partial, acc)
    else:
        if p_lse is not None:
            natural = gl.where(total == 0, float("inf"), lse * LN_2)
            gl.store(p_lse + token * strides.lse + head + o_head, natural, mask=m_head)
        if p_sink is not None:
            # Computed as the combine kernel does for one split, so that the bits are equal.
            sink = gl.load(p_sink + head + o_head, mask=m_head, other=0.0)
            kept = 1.0 / (1.0 + gl.exp2(sink * LOG2_E - gl.where(total == 0, 0.0, lse)))
            acc = acc * gl.expand_dims(gl.convert_layout(kept, OUTPUT_HEADS), 0)
        q_tile.store(acc.to(gl.bfloat16).permute((1, 0)))
        thread_barrier()
        if EPILOGUE.groups == 0:
            p_out += token * strides.out_token + head.to(gl.int64) * strides.out_head
        rows = HeadRows(p_sink, p_lse, p_out, strides.out_head, p_scale, tokens, padded_tokens, token, head, heads)
        for half in gl.static_range(D // HALF):
            store_half(q_tile, rows, p_cos, half * HALF, PARTIAL, EPILOGUE, ROWS)


class Tiling(NamedTuple):
    """Tiling of a launch.

    Attributes:
        block_h, block_n: heads and keys that a program takes at a time. warps: of a program.
        late: let the next kernel start only when the last keys have been loaded, so that its weight prefetch does not
            delay them.
        one_block: use the code for single blocks where rows are split into single blocks.
    """

    block_h: int
    block_n: int
    warps: int
    late: bool = False
    one_block: bool = False


NARROW = Tiling(16, 64, 8)
ONE_BLOCK = Tiling(16, 128, 8, late=True, one_block=True), Tiling(32, 128, 8, late=True, one_block=True)
MAX_PROGRAMS = 132
"""Largest launch of longer rows split into single blocks: one program for each SM of an H200."""
TILE = 16
SHORT = 256
"""Most keys of a short row."""
MAX_TILES, MIN_TILES = 256, 4
"""Tiles of 16 heads of all tokens, with short rows: more run the kernel for many tokens, fewer are narrow."""


MANY_HEADS = Tiling(64, 128, 8, late=True, one_block=True)
INVARIANT_TILES = (ONE_BLOCK[0], MAX_TILES // 8), (ONE_BLOCK[1], MAX_TILES // 4)
"""Tilings of batch-invariant calls with most tiles of 16 heads that they take; MANY_HEADS takes more."""
INVARIANT_KEYS = 9 * MANY_HEADS.block_n
"""Most keys of a row of a batch-invariant call. A row is split into single blocks, so that its sums follow from its own
keys; partial results of longer rows would cost more than the kernel for many tokens."""


def choose_tiling(tokens: int, heads: int, keys: int) -> Tiling | None:
    """Return the tiling for rows of at most `keys` keys; None where the kernel for many tokens is faster."""
    tiles = tokens * cdiv(heads, TILE)
    if keys <= SHORT:
        if tiles <= MIN_TILES and keys > ONE_BLOCK[0].block_n:
            return NARROW
        return ONE_BLOCK[0] if tiles <= MAX_TILES // 2 else ONE_BLOCK[1] if tiles <= MAX_TILES else None
    for tiling in (NARROW, *ONE_BLOCK):
        # With a program for every block and an SM for every program, none waits for keys twice.
        if tokens * cdiv(heads, tiling.block_h) * cdiv(keys, tiling.block_n) <= MAX_PROGRAMS:
            return tiling
    return None


def invariant_tiling(tokens: int, heads: int) -> Tiling:
    """Return the tiling of a batch-invariant call. Blocks of more heads have the same sums and read keys less often."""
    tiles = tokens * cdiv(heads, TILE)
    return next((tiling for tiling, most in INVARIANT_TILES if tiles <= most), MANY_HEADS)


def why_unsupported(call: DecodeCall) -> str:
    """Return why this kernel does not support a call that the Triton kernel supports, "" if it does."""
    tokens, heads, _ = call.q.shape
    keys = sum(cache.indices.shape[1] for cache in call.caches)
    if heads < MIN_HEADS:
        return f"it takes {MIN_HEADS} heads or more, these are {heads}"
    if call.batch_invariant == TOKENS:
        return "its sums differ from those of the kernels for more tokens, and the call is batch-invariant"
    if call.batch_invariant and keys > INVARIANT_KEYS:
        return f"batch-invariant rows have at most {INVARIANT_KEYS} keys, these have {keys}"
    if not call.batch_invariant and choose_tiling(tokens, heads, keys) is None:
        return f"it takes fewer tokens than {tokens} with {heads} heads and {keys} keys each"
    return why_unsupported_sm90(call)


def launch(
    call: DecodeCall, gpu: Gpu, splits: int = 0, into: Outputs | None = None, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Run `call` on `gpu` and return its outputs, in `into` or newly allocated.

    `splits` and `tiling` overrule `split_count` and `choose_tiling`; a batch-invariant call has neither.
    """
    tokens, heads, _ = call.q.shape
    widths = [keys.indices.shape[1] for keys in call.caches]
    if call.batch_invariant:
        tiling = invariant_tiling(tokens, heads)
    tiling = tiling or choose_tiling(tokens, heads, sum(widths)) or ONE_BLOCK[1]
    block_h, block_n, warps = tiling[:3]
    blocks = sum(cdiv(width, block_n) for width in widths)
    if call.batch_invariant:
        splits = max(1, blocks)
    splits = splits or split_count(max(1, tokens * cdiv(heads, block_h)), blocks, gpu)
    constants = {"TILING": tiling._replace(one_block=tiling.one_block and splits >= blocks)}
    variant = Variant(sparse_mla_decode_sm90_few_tokens_kernel, constants, block_h, block_n, warps, flat=False)
    return launch_variant(variant, call, gpu, splits, into)
