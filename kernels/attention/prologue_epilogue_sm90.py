"""Gluon device functions for sm_90: queries before attention, output rows after it. common.py has those for any GPU.

Queries of up to 32 heads are normed and rotated in shared memory, in loops over blocks of columns, and rounded once, as
`q_norm_rope` does: `norm_queries`, or `store_few_queries` in registers. 64 heads are not normed: `norm_factors` scale
the scores instead, because the norm has no weight. Then only the rotated columns are rounded, before the norm and not
after it, which is closer to the exact norm. Queries whose squares overflow count as zero, as in `q_norm_rope`; a head
with rotated columns or scores beyond float32 before the norm, which takes numbers above 2^60, has no result.
`norm_in_shared_memory` does the same with few registers.

Outputs pass through the shared memory of keys or queries. There they are scaled, rotated back and quantised in loops
over 16 heads, so that the registers of the GEMMs suffice and the code stays small: code that comes from memory once
costs as much as it is long. Rows of few heads are finished in blocks of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.quant import MANTISSA_BITS, UE8M0_BIAS, quantize_ue8m0
from .kv_load_sm90 import CACHED

# Keeps the loop around it from being unrolled; in a function that the loop calls it has no effect.
NO_UNROLL = gl.constexpr('.pragma "nounroll"; mov.u32 $0, 0;')
D = gl.constexpr(layout.HEAD_DIM)
HALF = gl.constexpr(layout.HEAD_DIM // 2)
BLOCK_H = gl.constexpr(64)
STEP = gl.constexpr(16)
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
COLUMNS = gl.constexpr(64)  # of a block of columns: 128 bytes, the width of a swizzled tile
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Layouts of finished rows of half the dims, without bank conflicts: 16-bit elements, and 32-bit sums.
FINISHED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))

PARTIAL_EXPONENT = gl.constexpr(14)  # of the largest number of a float16 partial result
ACT_TILE = gl.constexpr(layout.ACT_TILE)
HEAD_TILES = gl.constexpr(layout.HEAD_DIM // layout.ACT_TILE)
SCALE_ROW_ALIGN = gl.constexpr(layout.SCALE_ROW_ALIGN)


class Queries(NamedTuple):
    """Queries of a program: pointer to the first head, stride of heads, angles of the token, and eps of the norm.

    `p_cos` points to the cosines of the token, followed by its sines; it and `eps` may be None.
    """

    p_q: Any
    head_stride: Any
    p_cos: Any
    eps: Any


class HeadRows(NamedTuple):
    """Where a program stores its heads.

    Attributes:
        p_sink, p_lse: sink logits of the heads, and where their log-sum-exps are stored; either may be None.
        p_out, head_stride: the first head's row, bfloat16, and the stride of heads; or e4m3 `[groups, T, K]`.
        p_scale, tokens, padded_tokens: of e4m3, scales `[groups, n, Ta]`, T and Ta; of partial results, their units.
        token, head, heads: the token, the first head, and the number of heads from it on.
    """

    p_sink: Any
    p_lse: Any
    p_out: Any
    head_stride: Any
    p_scale: Any
    tokens: Any
    padded_tokens: Any
    token: Any
    head: Any
    heads: Any


class DecodeStrides(NamedTuple):
    """Strides of a decode call in elements, those of pages in units of 16 bytes. Other dims are contiguous."""

    out_token: Any
    out_head: Any
    lse: Any
    q_token: Any
    q_head: Any
    window_page: Any
    extra_page: Any
    window_indices: Any
    extra_indices: Any
    window_lens: Any
    extra_lens: Any
    positions: Any
    table: Any


class DecodeShape(NamedTuple):
    """Compile-time sizes and format of a decode call.

    Attributes:
        heads: of a token. window_log_page, extra_log_page: log2 of the tokens in a page.
        plain: keys are bfloat16 rows. grids: those of the window are mxfp8, those of the extra cache nvfp4.
    """

    heads: int
    window_log_page: int
    extra_log_page: int
    plain: bool
    grids: bool


class AngleTable(NamedTuple):
    """Where the angles of all tokens are: positions and their stride, the table, its row stride and its rows."""

    p_positions: Any
    position_stride: Any
    p_table: Any
    table_stride: Any
    max_pos: Any


@gluon.jit
def opaque(n):
    """Return the int32 `n` as a value that the compiler cannot see through.

    Expressions of it are computed where they stand, instead of before all loops and kept in registers; and a loop of
    so many iterations is not unrolled.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(n)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_pointer(p):
    """Return the pointer `p` as a value that the compiler cannot see through; see `opaque`."""
    p = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [p], dtype=p.dtype, is_pure=False, pack=1)
    return gl.multiple_of(p, 16)


@gluon.jit
def not_unrolled(count: gl.constexpr):
    """Return `count` as the end of a loop that is not unrolled: the compiler cannot know that the grid has one dim."""
    return count * gl.num_programs(1)


@gluon.jit
def table_row(table, token):
    """Load a token's position and return its int32 row of the `AngleTable`, or the nearest row that exists."""
    position = gl.load(table.p_positions + gl.to_tensor(token).to(gl.int64) * table.position_stride).to(gl.int64)
    return opaque(gl.minimum(gl.maximum(position, 0), opaque(table.max_pos) - 1).to(gl.int32))


@gluon.jit
def cosines_of(table, row):
    """Return the pointer to the cosines of a `table_row`, followed by its sines."""
    return table.p_table + row.to(gl.int64) * opaque(table.table_stride)


@gluon.jit
def angle_pointer(p_positions, p_table, strides, max_pos, token, CACHE: gl.constexpr = CACHED):
    """Return the pointer to the cosines of a token's position, followed by its sines."""
    position = gl.load(p_positions + token * strides.positions, cache_modifier=CACHE).to(gl.int64)
    return p_table + gl.minimum(gl.maximum(position, 0), max_pos - 1) * strides.table


@gluon.jit
def split_range(blocks, split, splits, min_blocks):
    """Return the first and the last block of a token's split, exclusive; programs beyond its splits have none."""
    own_splits = gl.maximum(gl.minimum(splits, (blocks + min_blocks - 1) // min_blocks), 1)
    begin = blocks * gl.minimum(split % splits, own_splits) // own_splits
    return begin, blocks * gl.minimum(split % splits + 1, own_splits) // own_splits


@gluon.jit
def fetch_angles(p_cos, x, ROPE: gl.constexpr, CACHE: gl.constexpr = CACHED):
    """Load cosines and sines of the pairs of columns of `x` `[N, C]`; 0 for pairs that are not rotated."""
    PAIRS: gl.constexpr = x.shape[1] // 2
    even, _ = gl.split(gl.reshape(x, [x.shape[0], PAIRS, 2]))
    o_pair = gl.arange(0, PAIRS, gl.SliceLayout(0, even.type.layout)) - (PAIRS - ROPE // 2)
    p_sin = p_cos + ROPE // 2
    cos = gl.load(p_cos + o_pair, mask=o_pair >= 0, other=0.0, cache_modifier=CACHE)
    sin = gl.load(p_sin + o_pair, mask=o_pair >= 0, other=0.0, cache_modifier=CACHE)
    return cos, sin


@gluon.jit
def rotate_columns(x, cos, sin, ROPE: gl.constexpr, INVERSE: gl.constexpr):
    """Rotate the last ROPE columns of float32 `x` `[N, C]` by the angles that `fetch_angles` loaded."""
    PAIRS: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [x.shape[0], PAIRS, 2]))
    o_pair = gl.arange(0, PAIRS, gl.SliceLayout(0, even.type.layout)) - (PAIRS - ROPE // 2)
    cos = gl.expand_dims(cos, 0)
    sin = gl.expand_dims(sin, 0)
    if INVERSE:
        sin = -sin
    # Selected, not multiplied by (1, 0): other columns may be infinite, and keep the sign of their zeros.
    rotated = gl.expand_dims(o_pair >= 0, 0)
    rotated_even = gl.where(rotated, even * cos - odd * sin, even)
    rotated_odd = gl.where(rotated, even * sin + odd * cos, odd)
    return gl.reshape(gl.join(rotated_even, rotated_odd), [x.shape[0], x.shape[1]])


@gluon.jit
def column_blocks(tile, WIDTH: gl.constexpr):
    """View a swizzled bfloat16 tile `[N, C]` as its blocks of columns `[C / WIDTH, N, WIDTH]`."""
    return reinterpret(tile, gl.bfloat16, [tile.shape[1] // WIDTH, tile.shape[0], WIDTH], SWIZZLED)


@triton.constexpr_function
def _query_block(count: int) -> int:
    """Return the width of the column blocks for the norm of `count` heads: a row has a thread for eight columns."""
    return 64 if count >= 16 else 128


@triton.constexpr_function
def query_layout(count: int) -> Any:
    """Return the layout of `count` heads, 8 or more, over four warps: a thread has the same columns of every block."""
    threads = _query_block(count) // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@triton.constexpr_function
def rotated_width(count: int, rope: int) -> int:
    """Return the number of last columns of `count` heads that are processed to rotate `rope` of them."""
    return next(width for width in (_query_block(count), 128, layout.HEAD_DIM // 2) if rope <= width)


@gluon.jit
def fetch_queries(
    p_q, head_stride, heads, COUNT: gl.constexpr, PARTIAL: gl.constexpr, QUERIES: gl.constexpr,
    FIRST: gl.constexpr = 0, LAST: gl.constexpr = D, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """Load the LAST columns of heads FIRST to FIRST + COUNT - 1; zeros from head `heads` on where PARTIAL."""
    o_head = gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(1, QUERIES)), 1) + FIRST
    o_dim = gl.expand_dims(gl.arange(0, LAST, gl.SliceLayout(0, QUERIES)), 0) + (D - LAST)
    p_row = p_q + (o_head.to(gl.int64) * head_stride + o_dim)
    if PARTIAL:
        q = gl.load(p_row, mask=(o_head < heads) & (o_dim >= 0), other=0.0, cache_modifier=CACHE)
    else:
        q = gl.load(p_row, cache_modifier=CACHE)
    return q


@gluon.jit
def norm_queries(q_tile, cos, sin, eps, ROPE: gl.constexpr):
    """Norm and rotate 8, 16 or 32 heads `[N, 512]` in shared memory, stored in `query_layout`, without a fence.

    A thread reads from a block of columns what it stored there itself.
    """
    COUNT: gl.constexpr = q_tile.shape[0]
    BLOCK: gl.constexpr = _query_block(COUNT)
    ROTATED: gl.constexpr = rotated_width(COUNT, ROPE)
    QUERIES: gl.constexpr = query_layout(COUNT)
    PAIRED: gl.constexpr = gl.BlockedLayout([1, 4, 2], [HALF // BLOCK, BLOCK // 8, 1], [4, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, PAIRED)
    blocks = column_blocks(q_tile, BLOCK)
    squares = gl.zeros([COUNT, BLOCK // 2], gl.float32, PAIRS)
    for block in range(not_unrolled(D // BLOCK)):
        x = blocks.index(block).load(QUERIES).to(gl.float32)
        even, odd = gl.split(gl.reshape(x, [COUNT, BLOCK // 2, 2]))
        squares += gl.convert_layout(gl.fma(even, even, odd * odd), PAIRS)
    total = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(1, QUERIES))
    factor = gl.expand_dims(gl.rsqrt(total * (1.0 / D) + eps), 1)
    for block in range(not_unrolled((D - ROTATED) // BLOCK)):
        columns = blocks.index(block)
        columns.store((columns.load(QUERIES).to(gl.float32) * factor).to(gl.bfloat16))
    rotated = q_tile.slice(D - ROTATED, ROTATED, 1)
    x = rotated.load(QUERIES).to(gl.float32) * factor
    rotated.store(rotate_columns(x, cos, sin, ROPE, False).to(gl.bfloat16))


@gluon.jit
def _opaque_queries(x):
    """Return bfloat16 `x` as a value that the compiler cannot see through, so that work on it is not moved ahead."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def copy_queries(p_q, head_stride, q_tile, heads, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTIAL: gl.constexpr):
    """Copy heads FIRST to FIRST + COUNT - 1 into `q_tile` `[N, 512]`, for `wgmma`."""
    q = fetch_queries(p_q, head_stride, heads, COUNT, PARTIAL, query_layout(COUNT), FIRST)
    q_tile.slice(FIRST, COUNT, 0).store(q)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def rotate_queries(x, cos, sin, ROPE: gl.constexpr):
    """Rotate bfloat16 `x` `[N, C]`, the last columns of queries, and round."""
    return _opaque_queries(rotate_columns(x.to(gl.float32), cos, sin, ROPE, False).to(gl.bfloat16))


@gluon.jit
def _dot_products_of_heads(q_tile, iterations, SCORES: gl.constexpr):
    """Return the dot products of 64 heads with each other, in layout SCORES; their diagonal is the heads' squares.

    The tensor core takes a loop of four instructions for it, where registers would take hundreds, and leaves each
    head's square where its scores will be. `iterations` is the number of blocks of 64 columns, hidden from the
    compiler: unrolled, the loop would be 4 KB of code.
    """
    blocks = column_blocks(q_tile, COLUMNS)
    products = warpgroup_mma_init(gl.zeros([BLOCK_H, BLOCK_H], gl.float32, SCORES))
    for block in range(iterations):
        gl.inline_asm_elementwise(NO_UNROLL, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        columns = blocks.index(block)
        products = warpgroup_mma(columns, columns.permute((1, 0)), products, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    # Until here, the GEMMs of other warps may read the raw columns.
    thread_barrier()
    return products


@gluon.jit
def norm_factors(q_tile, rotated, eps, SCORES: gl.constexpr):
    """Return the norm's factors of 64 heads, `[64]`. `rotated` replaces their last columns, without a fence."""
    ROTATED: gl.constexpr = rotated.shape[1]
    products = _dot_products_of_heads(q_tile, not_unrolled(D // COLUMNS), SCORES)
    q_tile.slice(D - ROTATED, ROTATED, 1).store(rotated)
    o_head = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES)), 1)
    o_other = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(0, SCORES)), 0)
    # Selected, not multiplied by (1, 0): values that are not finite stay with their head.
    squares = gl.sum(gl.where(o_head == o_other, products, 0.0), 1)
    return gl.rsqrt(squares * (1.0 / D) + eps)


@gluon.jit
def _diagonal(x, SCORES: gl.constexpr):
    """Return the diagonal of `x` `[64, 64]` with few registers, selected as in `norm_factors`.

    It is selected among blocks of 8 columns first, then within the block: all threads have columns of the same blocks,
    whose numbers take no registers.
    """
    EIGHTH: gl.constexpr = BLOCK_H // 8
    x = gl.reshape(x, [BLOCK_H, EIGHTH, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    o_row = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, ROWS)), 1)
    o_block = gl.arange(0, EIGHTH, gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    o_block = gl.expand_dims(gl.expand_dims(o_block, 0), 2)
    o_in = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, ROWS)), 0)
    block = gl.sum(gl.where(gl.expand_dims(o_row // 8, 1) == o_block, x, 0.0), 1)
    return gl.convert_layout(gl.sum(gl.where(o_row % 8 == o_in, block, 0.0), 1), gl.SliceLayout(1, SCORES))


class SharedQueries(NamedTuple):
    """Queries of 64 heads in shared memory that a warpgroup norms, with eps None if it does not.

    Attributes:
        q_tile: the queries; ready and normed: barriers of their arrival and of their norm.
        factors: float32 `[64]`, shared: `scale` times the factors of the norm.
        table: angles of all tokens. scale: of the scores. eps: of the norm.
    """

    q_tile: Any
    ready: Any
    normed: Any
    factors: Any
    table: Any
    scale: Any
    eps: Any


@gluon.jit
def norm_in_shared_memory(queries, phase, token, ROPE: gl.constexpr, SCORES: gl.constexpr):
    """Rotate the last ROPE columns, at most 64, of `SharedQueries` of `token` when they arrive, and store the factors.

    It takes few registers: angles are loaded after the squares, and 16 heads are rotated at a time.
    """
    q_tile = queries.q_tile
    ROWS: gl.constexpr = query_layout(STEP)
    row = table_row(queries.table, token)
    mbarrier.wait(queries.ready, phase)
    squares = _diagonal(_dot_products_of_heads(q_tile, opaque(D // COLUMNS), SCORES), SCORES)
    queries.factors.store(gl.rsqrt(squares * (1.0 / D) + queries.eps) * queries.scale)
    p_cos = cosines_of(queries.table, row)
    cos, sin = fetch_angles(p_cos, gl.zeros([STEP, COLUMNS], gl.bfloat16, ROWS), ROPE)
    last = column_blocks(q_tile, COLUMNS).index(D // COLUMNS - 1)
    steps = reinterpret(last, gl.bfloat16, [BLOCK_H // STEP, STEP, COLUMNS], SWIZZLED)
    for step in range(opaque(BLOCK_H // STEP)):
        x = steps.index(step).load(ROWS).to(gl.float32)
        steps.index(step).store(rotate_columns(x, cos, sin, ROPE, False).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _norm_and_rotate(q, cos, sin, eps, ROPE: gl.constexpr):
    """Norm and rotate queries `[N, 512]`, rounded once."""
    x = q.to(gl.float32)
    even, odd = gl.split(gl.reshape(x, [x.shape[0], D // 2, 2]))
    squares = gl.convert_layout(gl.sum(gl.fma(even, even, odd * odd), 1), gl.SliceLayout(1, x.type.layout))
    x = x * gl.expand_dims(gl.rsqrt(squares * (1.0 / D) + eps), 1)
    return rotate_columns(x, cos, sin, ROPE, False).to(gl.bfloat16)


@gluon.jit
def store_few_queries(q, cos, sin, eps, q_tile, ROPE: gl.constexpr):
    """Store loaded queries into shared memory, normed and rotated if there is an `eps`, without a fence."""
    q = _opaque_queries(q)  # so that nothing waits for the queries before this
    if eps is not None:
        q = _norm_and_rotate(q, cos, sin, eps, ROPE)
    q_tile.store(q)


@gluon.jit
def store_partial(acc, factor, q_tile, rows, FIRST: gl.constexpr, PARTIAL: gl.constexpr):
    """Store columns FIRST to FIRST + 255 of a partial result `[64, 512]`: `acc` times `factor` of each head.

    Where PARTIAL, only `rows.heads` heads exist. Partial results are contiguous, float32, or float16 with the units
    `rows.p_scale` `[64, 2]` of split_combine.py; these pass through the queries' shared memory.
    """
    if rows.p_scale is None:
        _store_partial_rows(acc * gl.expand_dims(factor, 1), rows.p_out, 0, rows.heads, FIRST, PARTIAL)
    else:
        unit, inverse = _unit(acc, factor)
        o_head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, acc.type.layout))
        gl.store(rows.p_scale + o_head * (D // HALF) + FIRST // HALF, unit, mask=o_head < rows.heads)
        finished, steps = _finished_tiles(q_tile, FIRST)
        finished.store((acc * gl.expand_dims(factor * inverse, 1)).to(gl.float16))
        thread_barrier()
        for step in range(not_unrolled(BLOCK_H // STEP)):
            y = steps.index(FIRST // HALF * (BLOCK_H // STEP) + step).load(ROWS)
            _store_partial_rows(y, rows.p_out, step * STEP, rows.heads, FIRST, PARTIAL)


@gluon.jit
def _finished_tiles(q_tile, FIRST: gl.constexpr):
    """View the queries' shared memory as float16: 64 rows of columns FIRST to FIRST + 255, and all of it in steps.

    The steps are 16 rows each, `[8, 16, 256]`: those of the first half of the columns, then those of the second.
    """
    both = reinterpret(q_tile, gl.float16, [2 * BLOCK_H, HALF], FINISHED)
    steps = reinterpret(q_tile, gl.float16, [2 * BLOCK_H // STEP, STEP, HALF], FINISHED)
    return both.slice(FIRST // HALF * BLOCK_H, BLOCK_H, 0), steps


@gluon.jit
def _unit(acc, factor):
    """Return the power of two that scales finite numbers of a row of `acc * factor` are below 2^15, and its inverse."""
    # Infinity times zero is NaN, and a maximum ignores NaN.
    top = gl.max(gl.abs(gl.fma(acc, gl.zeros_like(acc), acc)), 1) * factor
    exponent = (top.to(gl.int32, bitcast=True) >> MANTISSA_BITS) & 255
    # Both powers are normal numbers.
    exponent = gl.minimum(gl.maximum(exponent, PARTIAL_EXPONENT + 1), 2 * UE8M0_BIAS)
    unit = ((exponent - PARTIAL_EXPONENT) << MANTISSA_BITS).to(gl.float32, bitcast=True)
    inverse = ((2 * UE8M0_BIAS + PARTIAL_EXPONENT - exponent) << MANTISSA_BITS).to(gl.float32, bitcast=True)
    return unit, inverse


@gluon.jit
def _store_partial_rows(y, p_out, first, heads, FIRST: gl.constexpr, PARTIAL: gl.constexpr):
    """Store `y` `[N, 256]` as columns FIRST to FIRST + 255 of a partial result's rows `first` to `first` + N - 1."""
    o_head = gl.expand_dims(gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout)), 1) + first
    o_dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, y.type.layout)), 0)
    p_row = p_out + (o_head * D + FIRST + o_dim)
    if PARTIAL:
        gl.store(p_row, y, mask=(o_head < heads) & (o_dim >= 0))
    else:
        gl.store(p_row, y)


@gluon.jit
def store_rows(acc, by_head, tile, rows, p_cos, FIRST: gl.constexpr, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr):
    """Scale sums and store columns FIRST to FIRST + 255 of 64 heads through `tile`, shared memory of 64 KiB.

    Args:
        acc: float32 sums `[64, 256]`. They are scaled on the way, because scaling them in registers takes an
            instruction for each of a thread's 128.
        by_head: two factors of each head, float32 `[64]`, shared; the second may be None.
        rows: `HeadRows`; where PARTIAL, only `rows.heads` heads exist.
        p_cos: cosines and sines of the token's position, to rotate back.
    """
    STEPS: gl.constexpr = BLOCK_H // STEP
    reinterpret(tile, gl.float32, [BLOCK_H, HALF], SUMS).store(acc)
    steps = reinterpret(tile, gl.float32, [STEPS, STEP, HALF], SUMS)
    cos, sin = None, None
    if EPILOGUE.inverse and FIRST > 0:
        cos, sin = fetch_angles(p_cos, gl.zeros([STEP, HALF], gl.bfloat16, ROWS), EPILOGUE.rope)
    thread_barrier()
    for step in range(not_unrolled(STEPS)):
        y = steps.index(step).load(ROWS)
        for factors in gl.static_range(2):
            if by_head[factors] is not None:
                factor = reinterpret(by_head[factors], gl.float32, [STEPS, STEP], FLAT).index(step)
                y = y * gl.expand_dims(factor.load(gl.SliceLayout(1, ROWS)), 1)
        _store_step(y.to(gl.bfloat16), step * STEP, rows, cos, sin, FIRST, PARTIAL, EPILOGUE, ROWS)


@gluon.jit
def store_finished(
    acc, tile, results, token, head, p_cos, FIRST: gl.constexpr, H: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Round sums and store columns FIRST to FIRST + 255 of 64 heads through `tile`, shared memory of 32 KiB.

    Outputs have H heads and are contiguous; `results` are `p_out`, `p_scale`, `tokens` and `padded_tokens` of
    `HeadRows`. Rows are rotated back if there is a `p_cos`. No thread uses `tile` after this.
    """
    p_out, p_scale, tokens, padded_tokens = results
    STEPS: gl.constexpr = BLOCK_H // STEP
    p_out = opaque_pointer(p_out)
    if EPILOGUE.groups == 0:
        p_out += (token * H + head) * D
    else:
        p_scale, tokens, padded_tokens = opaque_pointer(p_scale), opaque(tokens), opaque(padded_tokens)
    reinterpret(tile, gl.bfloat16, [BLOCK_H, HALF], FINISHED).store(acc.to(gl.bfloat16))
    steps = reinterpret(tile, gl.bfloat16, [STEPS, STEP, HALF], FINISHED)
    cos, sin = None, None
    if p_cos is not None:
        # Not earlier: there are no registers for the angles while there are sums.
        cos, sin = fetch_angles(p_cos, gl.zeros([STEP, HALF], gl.bfloat16, ROWS), EPILOGUE.rope)
    thread_barrier()
    for step in range(opaque(STEPS)):
        gl.inline_asm_elementwise(NO_UNROLL, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        _store_step(
            steps.index(step).load(ROWS), step * STEP,
            HeadRows(None, None, p_out, D, p_scale, tokens, padded_tokens, token, head, H - head), cos, sin,
            FIRST, H % BLOCK_H != 0, EPILOGUE, ROWS,
        )  # fmt: skip
    thread_barrier()


@gluon.jit
def store_half(
    tile, rows, p_cos, FIRST: gl.constexpr, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr, ROWS: gl.constexpr
):
    """Store columns FIRST to FIRST + 255 of finished rows in `tile`, shared `[heads, 512]`, by the warps of ROWS."""
    BLOCK: gl.constexpr = tile.shape[0]
    COUNT: gl.constexpr = BLOCK if BLOCK < STEP else STEP
    half = tile.slice(FIRST, HALF, 1)
    cos, sin = None, None
    if EPILOGUE.inverse and FIRST > 0:
        cos, sin = fetch_angles(p_cos, gl.zeros([COUNT, HALF], gl.bfloat16, ROWS), EPILOGUE.rope)
    for step in gl.static_range(BLOCK // COUNT):
        y = half.slice(step * COUNT, COUNT, 0).load(ROWS)
        _store_step(y, step * COUNT, rows, cos, sin, FIRST, PARTIAL, EPILOGUE, ROWS)


@gluon.jit
def store_few_rows(tile, rows, p_cos, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr):
    """Store all columns of finished rows in `tile`, shared `[heads, 512]`."""
    BLOCK: gl.constexpr = tile.shape[0]
    # At most 32 numbers of a thread at a time. All rotated columns are in the last block.
    WIDTH: gl.constexpr = HALF if BLOCK <= STEP or EPILOGUE.rope > ACT_TILE else ACT_TILE
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [HALF // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    blocks = column_blocks(tile, WIDTH)
    cos, sin = None, None
    if EPILOGUE.inverse:
        cos, sin = fetch_angles(p_cos, gl.zeros([BLOCK, WIDTH], gl.bfloat16, ROWS), EPILOGUE.rope)
    for block in range(not_unrolled(D // WIDTH)):
        y = blocks.index(block).load(ROWS)
        _store_step(y, 0, rows, cos, sin, block * WIDTH, PARTIAL, EPILOGUE, ROWS)


@gluon.jit
def _store_step(y, first, rows, cos, sin, column, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr, ROWS: gl.constexpr):
    """Store the rows `y` from row `first` and column `column` on.

    The last columns are rotated back if there are angles, which are those of as many columns as `y` has.
    """
    if cos is not None:
        y = y.to(gl.float32)
        if column == D - y.shape[1]:
            y = gl.convert_layout(rotate_columns(y, cos, sin, EPILOGUE.rope, True), ROWS)
    if EPILOGUE.groups == 0:
        o_head = gl.expand_dims(gl.arange(0, y.shape[0], gl.SliceLayout(1, ROWS)), 1) + first
        o_dim = gl.expand_dims(gl.arange(0, y.shape[1], gl.SliceLayout(0, ROWS)), 0)
        y = y.to(gl.bfloat16)
        p_row = rows.p_out + (o_head.to(gl.int64) * rows.head_stride + column + o_dim)
        if PARTIAL:
            gl.store(p_row, y, mask=(o_head < rows.heads) & (o_dim >= 0))
        else:
            gl.store(p_row, y)
    else:
        _store_quantized(y.to(gl.float32), rows, rows.head + first, column, EPILOGUE, ROWS)


@gluon.jit
def _store_quantized(x, rows, head, column, EPILOGUE: gl.constexpr, ROWS: gl.constexpr):
    """Store columns from `column` on of the heads `x` from `head` on as e4m3, with the scales of one or two tiles."""
    GROUP_HEADS: gl.constexpr = EPILOGUE.group_heads
    tokens, padded_tokens, token = rows.tokens, rows.padded_tokens, rows.token
    COUNT: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    TILES: gl.constexpr = WIDTH // ACT_TILE
    values, byte = quantize_ue8m0(gl.reshape(x, [COUNT, TILES, ACT_TILE]), 2)
    codes = gl.reshape(values, [COUNT, WIDTH])
    o_head = head + gl.arange(0, COUNT, gl.SliceLayout(1, ROWS))
    row = ((o_head // GROUP_HEADS).to(gl.int64) * tokens + token) * GROUP_HEADS + o_head % GROUP_HEADS
    o_dim = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    live = gl.expand_dims(o_head < EPILOGUE.groups * GROUP_HEADS, 1)
    gl.store(rows.p_out + (gl.expand_dims(row, 1) * D + column + o_dim), gl.convert_layout(codes, ROWS), mask=live)

    o_head = head + gl.arange(0, COUNT, gl.SliceLayout(1, byte.type.layout))
    o_tile = gl.expand_dims(gl.arange(0, TILES, gl.SliceLayout(0, byte.type.layout)), 0)
    if EPILOGUE.packed:
        # The pieces of a word come from several warpgroups, or one after the other.
        PIECE: gl.constexpr = gl.int16 if TILES == 2 else gl.int8
        PIECES: gl.constexpr = HEAD_TILES // TILES
        p_piece = rows.p_scale.to(gl.pointer_type(PIECE), bitcast=True) + column // WIDTH
        p_piece += (o_head.to(gl.int64) * padded_tokens + token) * PIECES
        scale = gl.sum(byte << (8 * o_tile), 1).to(PIECE)
        live = o_head < EPILOGUE.groups * GROUP_HEADS
        gl.store(p_piece, scale, mask=live)
        if token == tokens - 1:
            for pad in gl.static_range(1, SCALE_ROW_ALIGN):
                gl.store(p_piece + PIECES * pad, gl.zeros_like(scale), mask=live & (token + pad < padded_tokens))
    else:
        o_head = gl.expand_dims(o_head, 1)
        scale_row = (o_head * HEAD_TILES + column // ACT_TILE + o_tile).to(gl.int64) * padded_tokens + token
        p_one = rows.p_scale + scale_row
        scale = (byte << MANTISSA_BITS).to(gl.float32, bitcast=True)
        live = (o_head < EPILOGUE.groups * GROUP_HEADS) & (o_tile >= 0)
        gl.store(p_one, scale, mask=live)
        if token == tokens - 1:
            for pad in gl.static_range(1, SCALE_ROW_ALIGN):
                gl.store(p_one + pad, gl.zeros_like(scale), mask=live & (token + pad < padded_tokens))
