"""Device functions of Hopper warpgroups around attention; attention_rows.py has the same for any GPU.

Sums pass through the shared memory of keys or of queries on their way out: there they are multiplied by what their
heads have, rotated back and quantised. That is done in loops, over 16 heads at a time: the registers of the matrix
products suffice, and code that is gone through once costs as much as it is long, where it comes out of memory. Of few
heads all rows are finished at a time, in blocks of columns. Queries are in queries_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.quant import MANTISSA_BITS, UE8M0_BIAS, quantize_ue8m0
from .kv_load_sm90 import CACHED

# Stands in the body of the loop that is to stay one: in a function that the loop calls it has no effect.
NO_COPIES = gl.constexpr('.pragma "nounroll"; mov.u32 $0, 0;')
D = gl.constexpr(layout.HEAD_DIM)
HALF = gl.constexpr(layout.HEAD_DIM // 2)
BLOCK_H = gl.constexpr(64)
STEP = gl.constexpr(16)
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
COLUMNS = gl.constexpr(64)  # of a block of columns, 128 bytes: a swizzled tile lies in those
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Of finished rows: as wide as half of the dims, and the threads of a warp meet no bank twice.
FINISHED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # the same, of 32 bits

PART_EXPONENT = gl.constexpr(14)  # of the largest number of a float16 part
ACT_TILE = gl.constexpr(layout.ACT_TILE)
STRIPS = gl.constexpr(layout.HEAD_DIM // layout.ACT_TILE)
SCALE_ROW_ALIGN = gl.constexpr(layout.SCALE_ROW_ALIGN)


@gluon.jit
def here(n):
    """The int32 `n`, which the compiler cannot see through.

    What follows from it is calculated where it stands, not in front of all loops and kept in registers meanwhile; and a
    loop of so many turns stays one.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(n)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def address_here(p):
    """As `here`, of the address of a tensor."""
    p = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [p], dtype=p.dtype, is_pure=False, pack=1)
    return gl.multiple_of(p, 16)


@gluon.jit
def table_row(place, token):
    """int32 row of the table with the angles of a token: that of its position, or the nearest that there is.

    `place`: positions and their stride, the table, its stride and how many rows it has.
    """
    position = gl.load(place[0] + gl.to_tensor(token).to(gl.int64) * place[1]).to(gl.int64)
    return here(gl.minimum(gl.maximum(position, 0), here(place[4]) - 1).to(gl.int32))


@gluon.jit
def angles_of(place, row):
    """Where the cosines of a `table_row` are, behind which are its sines."""
    return place[2] + row.to(gl.int64) * here(place[3])


@gluon.jit
def fetch_angles(p_cos, x, ROPE: gl.constexpr, CACHE: gl.constexpr = CACHED):
    """Of the pairs of columns of `x` `[N, C]`, cosines and sines; 0 for those that do not turn.

    `p_cos` points to the cosines, behind which are the sines.
    """
    PAIRS: gl.constexpr = x.shape[1] // 2
    even, _ = gl.split(gl.reshape(x, [x.shape[0], PAIRS, 2]))
    o_pair = gl.arange(0, PAIRS, gl.SliceLayout(0, even.type.layout)) - (PAIRS - ROPE // 2)
    p_sin = p_cos + ROPE // 2
    cos = gl.load(p_cos + o_pair, mask=o_pair >= 0, other=0.0, cache_modifier=CACHE)
    sin = gl.load(p_sin + o_pair, mask=o_pair >= 0, other=0.0, cache_modifier=CACHE)
    return cos, sin


@gluon.jit
def turn_columns(x, cos, sin, ROPE: gl.constexpr, INVERSE: gl.constexpr):
    """float32 `x` `[N, C]` with its last ROPE columns turned by what `fetch_angles` has given."""
    PAIRS: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [x.shape[0], PAIRS, 2]))
    o_pair = gl.arange(0, PAIRS, gl.SliceLayout(0, even.type.layout)) - (PAIRS - ROPE // 2)
    cos = gl.expand_dims(cos, 0)
    sin = gl.expand_dims(sin, 0)
    if INVERSE:
        sin = -sin
    # Selected, not multiplied by (1, 0): what does not turn may be infinite, and keeps the sign of its zeros.
    turns = gl.expand_dims(o_pair >= 0, 0)
    turned_even = gl.where(turns, even * cos - odd * sin, even)
    turned_odd = gl.where(turns, even * sin + odd * cos, odd)
    return gl.reshape(gl.join(turned_even, turned_odd), [x.shape[0], x.shape[1]])


@gluon.jit
def not_unrolled(count: gl.constexpr):
    """`count`, as the end of a loop that stays one: the compiler does not know that programs are in one row."""
    return count * gl.num_programs(1)


@gluon.jit
def column_blocks(tile, WIDTH: gl.constexpr):
    """A swizzled bfloat16 tile `[N, C]` as its blocks of columns `[C / WIDTH, N, WIDTH]`."""
    return reinterpret(tile, gl.bfloat16, [tile.shape[1] // WIDTH, tile.shape[0], WIDTH], SWIZZLED)


@gluon.jit
def store_part(acc, factor, q_tile, p_out, p_unit, heads, FIRST: gl.constexpr, PARTIAL: gl.constexpr):
    """Columns FIRST to FIRST + 255 of a part `[64, 512]`, contiguous, which is `acc` times `factor` of each head.

    Where PARTIAL, the first `heads` of them exist. A part is float32, or float16 with units `[64, 2]` as
    split_softmax.py has them, and goes by way of the queries' shared memory then.
    """
    if p_unit is None:
        _store_part_rows(acc * gl.expand_dims(factor, 1), p_out, 0, heads, FIRST, PARTIAL)
    else:
        unit, inverse = _unit(acc, factor)
        o_head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, acc.type.layout))
        gl.store(p_unit + o_head * (D // HALF) + FIRST // HALF, unit, mask=o_head < heads)
        finished, steps = _finished(q_tile, FIRST)
        finished.store((acc * gl.expand_dims(factor * inverse, 1)).to(gl.float16))
        thread_barrier()
        for step in range(not_unrolled(BLOCK_H // STEP)):
            y = steps.index(FIRST // HALF * (BLOCK_H // STEP) + step).load(ROWS)
            _store_part_rows(y, p_out, step * STEP, heads, FIRST, PARTIAL)


@gluon.jit
def _finished(q_tile, FIRST: gl.constexpr):
    """The queries' shared memory, of float16: room for 64 rows of columns FIRST to FIRST + 255; and all of it in steps
    of 16 rows, `[8, 16, 256]`, those of the first half of the columns and those of the last.
    """
    both = reinterpret(q_tile, gl.float16, [2 * BLOCK_H, HALF], FINISHED)
    steps = reinterpret(q_tile, gl.float16, [2 * BLOCK_H // STEP, STEP, HALF], FINISHED)
    return both.slice(FIRST // HALF * BLOCK_H, BLOCK_H, 0), steps


@gluon.jit
def _unit(acc, factor):
    """Power of two in which the finite numbers of each row of `acc` times its `factor` are below 2^15; its inverse."""
    # Infinity times zero is NaN, and a maximum passes over NaN.
    top = gl.max(gl.abs(gl.fma(acc, gl.zeros_like(acc), acc)), 1) * factor
    exponent = (top.to(gl.int32, bitcast=True) >> MANTISSA_BITS) & 255
    # Both powers are normal numbers.
    exponent = gl.minimum(gl.maximum(exponent, PART_EXPONENT + 1), 2 * UE8M0_BIAS)
    unit = ((exponent - PART_EXPONENT) << MANTISSA_BITS).to(gl.float32, bitcast=True)
    inverse = ((2 * UE8M0_BIAS + PART_EXPONENT - exponent) << MANTISSA_BITS).to(gl.float32, bitcast=True)
    return unit, inverse


@gluon.jit
def _store_part_rows(y, p_out, first, heads, FIRST: gl.constexpr, PARTIAL: gl.constexpr):
    """`y` `[N, 256]` as columns FIRST to FIRST + 255 of a part's rows `first` to `first` + N - 1."""
    o_head = gl.expand_dims(gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout)), 1) + first
    o_dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, y.type.layout)), 0)
    p_row = p_out + (o_head * D + FIRST + o_dim)
    if PARTIAL:
        gl.store(p_row, y, mask=(o_head < heads) & (o_dim >= 0))
    else:
        gl.store(p_row, y)


@gluon.jit
def store_rows(
    acc, by_head, tile, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, p_cos,
    FIRST: gl.constexpr, ROPE: gl.constexpr, PARTIAL: gl.constexpr, INVERSE: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + 255 of the output of 64 heads from `head` on, by way of `tile`, shared memory of 64 KiB.

    Where PARTIAL, the first `heads` of them exist. Sums are multiplied on the way: before it, a factor would be an
    instruction for each of a thread's 128.

    Args:
        acc: float32 sums `[64, 256]`.
        by_head: two factors of each head, float32 `[64]`, shared; the second may be None.
        p_out: the first head's row, bfloat16, with a distance of heads; e4m3 `[GROUPS, T, K]` where GROUPS > 0.
        p_scale, tokens, padded_tokens: scales `[GROUPS, n, Ta]`, T and Ta, where GROUPS > 0.
        p_cos: cosines and sines of the token's position, where INVERSE.
    """
    STEPS: gl.constexpr = BLOCK_H // STEP
    reinterpret(tile, gl.float32, [BLOCK_H, HALF], SUMS).store(acc)
    steps = reinterpret(tile, gl.float32, [STEPS, STEP, HALF], SUMS)
    cos, sin = None, None
    if INVERSE and FIRST > 0:
        cos, sin = fetch_angles(p_cos, gl.zeros([STEP, HALF], gl.bfloat16, ROWS), ROPE)
    thread_barrier()
    for step in range(not_unrolled(STEPS)):
        y = steps.index(step).load(ROWS)
        for factors in gl.static_range(2):
            if by_head[factors] is not None:
                factor = reinterpret(by_head[factors], gl.float32, [STEPS, STEP], FLAT).index(step)
                y = y * gl.expand_dims(factor.load(gl.SliceLayout(1, ROWS)), 1)
        _store_step(
            y.to(gl.bfloat16), step * STEP, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads,
            cos, sin, FIRST, ROPE, PARTIAL, GROUPS, GROUP_HEADS, PACKED, ROWS,
        )  # fmt: skip


@gluon.jit
def store_finished(
    acc, tile, p_out, p_scale, tokens, padded_tokens, token, head, p_cos,
    FIRST: gl.constexpr, H: gl.constexpr, ROPE: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As `store_rows`, of finished sums, of H heads, to contiguous rows, by way of `tile`, shared memory of 32 KiB.

    They are rounded before they get there, and turned back where there is a `p_cos`. Nobody uses `tile` any more when
    this returns.
    """
    STEPS: gl.constexpr = BLOCK_H // STEP
    p_out = address_here(p_out)
    if GROUPS == 0:
        p_out += (token * H + head) * D
    else:
        p_scale, tokens, padded_tokens = address_here(p_scale), here(tokens), here(padded_tokens)
    reinterpret(tile, gl.bfloat16, [BLOCK_H, HALF], FINISHED).store(acc.to(gl.bfloat16))
    steps = reinterpret(tile, gl.bfloat16, [STEPS, STEP, HALF], FINISHED)
    cos, sin = None, None
    if p_cos is not None:
        # No earlier: beside all of the sums there are no registers for them.
        cos, sin = fetch_angles(p_cos, gl.zeros([STEP, HALF], gl.bfloat16, ROWS), ROPE)
    thread_barrier()
    for step in range(here(STEPS)):
        gl.inline_asm_elementwise(NO_COPIES, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        _store_step(
            steps.index(step).load(ROWS), step * STEP, p_out, D, p_scale, tokens, padded_tokens, token, head, H - head,
            cos, sin, FIRST, ROPE, H % BLOCK_H != 0, GROUPS, GROUP_HEADS, PACKED, ROWS,
        )  # fmt: skip
    thread_barrier()


@gluon.jit
def store_half(
    tile, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, p_cos,
    FIRST: gl.constexpr, ROPE: gl.constexpr, PARTIAL: gl.constexpr, INVERSE: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """As `store_rows`, of rows that are in `tile`, shared `[heads, 512]`, already; by the warps that ROWS is for."""
    BLOCK: gl.constexpr = tile.shape[0]
    COUNT: gl.constexpr = BLOCK if BLOCK < STEP else STEP
    half = tile.slice(FIRST, HALF, 1)
    cos, sin = None, None
    if INVERSE and FIRST > 0:
        cos, sin = fetch_angles(p_cos, gl.zeros([COUNT, HALF], gl.bfloat16, ROWS), ROPE)
    for step in gl.static_range(BLOCK // COUNT):
        _store_step(
            half.slice(step * COUNT, COUNT, 0).load(ROWS), step * COUNT, p_out, out_head_stride, p_scale, tokens,
            padded_tokens, token, head, heads, cos, sin, FIRST, ROPE, PARTIAL, GROUPS, GROUP_HEADS, PACKED, ROWS,
        )  # fmt: skip


@gluon.jit
def store_few_rows(
    tile, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, p_cos, ROPE: gl.constexpr,
    PARTIAL: gl.constexpr, INVERSE: gl.constexpr, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As `store_rows`, of all columns of rows that are in `tile`, shared `[heads, 512]`, already."""
    BLOCK: gl.constexpr = tile.shape[0]
    # At most 32 numbers of a thread at a time. All that turns is in one block, the last.
    WIDTH: gl.constexpr = HALF if BLOCK <= STEP or ROPE > ACT_TILE else ACT_TILE
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [HALF // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    blocks = column_blocks(tile, WIDTH)
    cos, sin = None, None
    if INVERSE:
        cos, sin = fetch_angles(p_cos, gl.zeros([BLOCK, WIDTH], gl.bfloat16, ROWS), ROPE)
    for block in range(not_unrolled(D // WIDTH)):
        _store_step(
            blocks.index(block).load(ROWS), 0, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head,
            heads, cos, sin, block * WIDTH, ROPE, PARTIAL, GROUPS, GROUP_HEADS, PACKED, ROWS,
        )  # fmt: skip


@gluon.jit
def _store_step(
    y, first, p_out, out_head_stride, p_scale, tokens, padded_tokens, token, head, heads, cos, sin, column,
    ROPE: gl.constexpr, PARTIAL: gl.constexpr, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr, PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """As `store_rows`, of the rows `y` from row `first` and column `column` on.

    The last columns are turned back where there are angles, which are those of as many columns as `y` has.
    """
    if cos is not None:
        y = y.to(gl.float32)
        if column == D - y.shape[1]:
            y = gl.convert_layout(turn_columns(y, cos, sin, ROPE, True), ROWS)
    if GROUPS == 0:
        o_head = gl.expand_dims(gl.arange(0, y.shape[0], gl.SliceLayout(1, ROWS)), 1) + first
        o_dim = gl.expand_dims(gl.arange(0, y.shape[1], gl.SliceLayout(0, ROWS)), 0)
        y = y.to(gl.bfloat16)
        p_row = p_out + (o_head.to(gl.int64) * out_head_stride + column + o_dim)
        if PARTIAL:
            gl.store(p_row, y, mask=(o_head < heads) & (o_dim >= 0))
        else:
            gl.store(p_row, y)
    else:
        _store_quantized(
            y.to(gl.float32), p_out, p_scale, tokens, padded_tokens, token, head + first, column, GROUPS, GROUP_HEADS,
            PACKED, ROWS,
        )  # fmt: skip


@gluon.jit
def _store_quantized(
    x, p_values, p_scale, tokens, padded_tokens, token, head, column, GROUPS: gl.constexpr, GROUP_HEADS: gl.constexpr,
    PACKED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Columns from `column` on of the heads `x` from `head` on as e4m3, and the scales of their strips, one or two."""
    COUNT: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    HERE: gl.constexpr = WIDTH // ACT_TILE
    values, byte = quantize_ue8m0(gl.reshape(x, [COUNT, HERE, ACT_TILE]), 2)
    codes = gl.reshape(values, [COUNT, WIDTH])
    o_head = head + gl.arange(0, COUNT, gl.SliceLayout(1, ROWS))
    row = ((o_head // GROUP_HEADS).to(gl.int64) * tokens + token) * GROUP_HEADS + o_head % GROUP_HEADS
    o_dim = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    live = gl.expand_dims(o_head < GROUPS * GROUP_HEADS, 1)
    gl.store(p_values + (gl.expand_dims(row, 1) * D + column + o_dim), gl.convert_layout(codes, ROWS), mask=live)

    o_head = head + gl.arange(0, COUNT, gl.SliceLayout(1, byte.type.layout))
    o_strip = gl.expand_dims(gl.arange(0, HERE, gl.SliceLayout(0, byte.type.layout)), 0)
    if PACKED:
        # The pieces of a word come from several warpgroups, or one after the other.
        PIECE: gl.constexpr = gl.int16 if HERE == 2 else gl.int8
        PIECES: gl.constexpr = STRIPS // HERE
        p_piece = p_scale.to(gl.pointer_type(PIECE), bitcast=True) + column // WIDTH
        p_piece += (o_head.to(gl.int64) * padded_tokens + token) * PIECES
        scale = gl.sum(byte << (8 * o_strip), 1).to(PIECE)
        live = o_head < GROUPS * GROUP_HEADS
        gl.store(p_piece, scale, mask=live)
        if token == tokens - 1:
            for pad in gl.static_range(1, SCALE_ROW_ALIGN):
                gl.store(p_piece + PIECES * pad, gl.zeros_like(scale), mask=live & (token + pad < padded_tokens))
    else:
        o_head = gl.expand_dims(o_head, 1)
        p_one = p_scale + ((o_head * STRIPS + column // ACT_TILE + o_strip).to(gl.int64) * padded_tokens + token)
        scale = (byte << MANTISSA_BITS).to(gl.float32, bitcast=True)
        live = (o_head < GROUPS * GROUP_HEADS) & (o_strip >= 0)
        gl.store(p_one, scale, mask=live)
        if token == tokens - 1:
            for pad in gl.static_range(1, SCALE_ROW_ALIGN):
                gl.store(p_one + pad, gl.zeros_like(scale), mask=live & (token + pad < padded_tokens))
