"""Device functions of Hopper warpgroups that bring queries into shared memory, with norm and RoPE if asked to.

Up to 32 heads of a program are normed and turned by one warpgroup where they are, in loops over blocks of columns, and
rounded once, as the op does that norms alone: `norm_queries`, or `put_few_queries` in registers.

Of 64 heads that would be a thousand instructions in each of two warpgroups in front of the first scores. They stay as
they are, but for the columns that turn, and `norm_factors` are what the norm multiplies scores by: it has no weight.
So the turned columns are rounded in front of the norm and not behind it, and the others not at all, which is nearer to
the norm than what the op that norms alone rounds. As there, queries whose squares overflow count as zero. But a turned
column, or a product with a key, that is beyond float32 before the norm makes it small stays infinite or becomes NaN: a
head of such queries and keys has no result. That takes numbers above 2^60. `norm_in_place` is the same for a warpgroup
that has few registers.
"""

from __future__ import annotations

from typing import Any

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
from ..hopper.gluon import reinterpret, thread_barrier
from .kv_load_sm90 import CACHED
from .output_epilogue_sm90 import (
    BLOCK_H,
    COLUMNS,
    HALF,
    NO_COPIES,
    STEP,
    SWIZZLED,
    D,
    angles_of,
    column_blocks,
    fetch_angles,
    here,
    not_unrolled,
    table_row,
    turn_columns,
)


@triton.constexpr_function
def _block_of(count: int) -> int:
    """Columns of `count` heads that are gone through at a time: a row has a thread for every eight of them."""
    return 64 if count >= 16 else 128


@triton.constexpr_function
def queries_of(count: int) -> Any:
    """How `count` heads, 8 or more, are spread over four warps. A thread has the same columns of every block."""
    threads = _block_of(count) // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@triton.constexpr_function
def turning_of(count: int, rope: int) -> int:
    """How many columns of `count` heads are gone through so that the last `rope` turn."""
    return next(width for width in (_block_of(count), 128, layout.HEAD_DIM // 2) if rope <= width)


@gluon.jit
def fetch_queries(
    p_q, head_stride, heads, COUNT: gl.constexpr, PARTIAL: gl.constexpr, QUERIES: gl.constexpr,
    FIRST: gl.constexpr = 0, LAST: gl.constexpr = D, CACHE: gl.constexpr = CACHED,
):  # fmt: skip
    """The LAST columns of heads FIRST to FIRST + COUNT - 1 as they are, zeros from head `heads` on where PARTIAL."""
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
    """Norm and turn 8, 16 or 32 heads where they are, `[N, 512]`, stored as `queries_of` has them. Fences nothing.

    A thread finds in a block of columns what it has put there itself.
    """
    COUNT: gl.constexpr = q_tile.shape[0]
    BLOCK: gl.constexpr = _block_of(COUNT)
    TURNING: gl.constexpr = turning_of(COUNT, ROPE)
    QUERIES: gl.constexpr = queries_of(COUNT)
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
    for block in range(not_unrolled((D - TURNING) // BLOCK)):
        columns = blocks.index(block)
        columns.store((columns.load(QUERIES).to(gl.float32) * factor).to(gl.bfloat16))
    turning = q_tile.slice(D - TURNING, TURNING, 1)
    x = turning.load(QUERIES).to(gl.float32) * factor
    turning.store(turn_columns(x, cos, sin, ROPE, False).to(gl.bfloat16))


@gluon.jit
def _in_place(x):
    """bfloat16 `x`, which the compiler cannot see through: what is in front of this stays in front."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def put_queries(p_q, head_stride, q_tile, heads, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTIAL: gl.constexpr):
    """Heads FIRST to FIRST + COUNT - 1 as they are into `q_tile` `[N, 512]`, for the matrix unit."""
    q = fetch_queries(p_q, head_stride, heads, COUNT, PARTIAL, queries_of(COUNT), FIRST)
    q_tile.slice(FIRST, COUNT, 0).store(q)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def turn_queries(x, cos, sin, ROPE: gl.constexpr):
    """bfloat16 `x` `[N, C]`, the last columns of queries, with what turns of them turned and rounded."""
    return _in_place(turn_columns(x.to(gl.float32), cos, sin, ROPE, False).to(gl.bfloat16))


@gluon.jit
def _products_of_heads(q_tile, turns, SCORES: gl.constexpr):
    """The products of 64 heads with each other, of layout SCORES, in `turns` turns of a loop: as many as blocks of 64
    columns, a number that the compiler does not know.

    The heads' squares are its diagonal: the matrix unit does in a loop of four instructions what takes hundreds in
    registers, and has each head's square where its scores will be. Unrolled that would be 4 KB of code.
    """
    blocks = column_blocks(q_tile, COLUMNS)
    products = warpgroup_mma_init(gl.zeros([BLOCK_H, BLOCK_H], gl.float32, SCORES))
    for block in range(turns):
        gl.inline_asm_elementwise(NO_COPIES, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        columns = blocks.index(block)
        products = warpgroup_mma(columns, columns.permute((1, 0)), products, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    # Until here other warps' products have read the raw columns.
    thread_barrier()
    return products


@gluon.jit
def norm_factors(q_tile, turned, eps, SCORES: gl.constexpr):
    """What the norm multiplies 64 heads by, `[64]`. `turned` takes the place of their last columns, unfenced."""
    TURNING: gl.constexpr = turned.shape[1]
    products = _products_of_heads(q_tile, not_unrolled(D // COLUMNS), SCORES)
    q_tile.slice(D - TURNING, TURNING, 1).store(turned)
    o_head = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES)), 1)
    o_other = gl.expand_dims(gl.arange(0, BLOCK_H, gl.SliceLayout(0, SCORES)), 0)
    # Selected, not multiplied by (1, 0): what is not finite stays with its head.
    squares = gl.sum(gl.where(o_head == o_other, products, 0.0), 1)
    return gl.rsqrt(squares * (1.0 / D) + eps)


@gluon.jit
def _diagonal(x, SCORES: gl.constexpr):
    """Of `x` `[64, 64]`, selected as in `norm_factors`, by a warpgroup that has few registers.

    First among blocks of 8 columns, then in the block: all threads have columns of the same blocks, whose numbers take
    no registers.
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


@gluon.jit
def norm_in_place(q_tile, q_ready, phase, factors, place, token, scale, eps, ROPE: gl.constexpr, SCORES: gl.constexpr):
    """Turn the last ROPE columns, 64 or less, of 64 heads of a token when they are in `q_tile`, for the matrix unit.

    `scale` times what the norm multiplies them by goes into `factors`, float32 `[64]`, shared. `place`: of `table_row`.
    Few registers are taken: angles are loaded when the squares are done, and 16 heads turn at a time.
    """
    ROWS: gl.constexpr = queries_of(STEP)
    row = table_row(place, token)
    mbarrier.wait(q_ready, phase)
    squares = _diagonal(_products_of_heads(q_tile, here(D // COLUMNS), SCORES), SCORES)
    factors.store(gl.rsqrt(squares * (1.0 / D) + eps) * scale)
    cos, sin = fetch_angles(angles_of(place, row), gl.zeros([STEP, COLUMNS], gl.bfloat16, ROWS), ROPE)
    last = column_blocks(q_tile, COLUMNS).index(D // COLUMNS - 1)
    steps = reinterpret(last, gl.bfloat16, [BLOCK_H // STEP, STEP, COLUMNS], SWIZZLED)
    for step in range(here(BLOCK_H // STEP)):
        x = steps.index(step).load(ROWS).to(gl.float32)
        steps.index(step).store(turn_columns(x, cos, sin, ROPE, False).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _normed(q, cos, sin, eps, ROPE: gl.constexpr):
    """Queries `[N, 512]` with norm and RoPE, rounded once."""
    x = q.to(gl.float32)
    even, odd = gl.split(gl.reshape(x, [x.shape[0], D // 2, 2]))
    squares = gl.convert_layout(gl.sum(gl.fma(even, even, odd * odd), 1), gl.SliceLayout(1, x.type.layout))
    x = x * gl.expand_dims(gl.rsqrt(squares * (1.0 / D) + eps), 1)
    return turn_columns(x, cos, sin, ROPE, False).to(gl.bfloat16)


@gluon.jit
def put_few_queries(q, cos, sin, eps, q_tile, ROPE: gl.constexpr):
    """What `fetch_queries` loaded into shared memory, normed and rotated if there is an `eps`. Fences nothing."""
    q = _in_place(q)  # so that nothing waits for the queries any earlier
    if eps is not None:
        q = _normed(q, cos, sin, eps, ROPE)
    q_tile.store(q)
