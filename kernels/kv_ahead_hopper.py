"""Device functions of a Hopper kernel that starts before the one in front of it has ended: what a token attends.

What they load may be about to change. They read past the first-level cache, which would keep it, and a kernel calls
them twice: before it waits, to ask the L2 cache for keys as far as the step's metadata is there already, and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import layout
from .kv_load_hopper import ROW_WORDS, place_of, row_length

LINE_WORDS = gl.constexpr(32)  # of the L2 cache
SCALE_WORDS = gl.constexpr(layout.FP8_DS_MLA.scale // 4)


@gluon.jit
def extent(p_lens0, lens0_stride, p_lens1, lens1_stride, width0, width1, token, BLOCK_N: gl.constexpr):
    """Of a token: how long its rows of indices are, and blocks of the first and of both."""
    length0 = row_length(p_lens0, lens0_stride, token, width0, ".cg")
    length1 = row_length(p_lens1, lens1_stride, token, width1, ".cg")
    blocks0 = (length0 + BLOCK_N - 1) // BLOCK_N
    return length0, length1, blocks0, blocks0 + (length1 + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def angles(p_positions, position_stride, p_table, table_stride, max_pos, token):
    """Cosines and sines of a token's position."""
    position = gl.load(p_positions + token * position_stride, cache_modifier=".cg").to(gl.int64)
    return p_table + gl.minimum(gl.maximum(position, 0), max_pos - 1) * table_stride


@gluon.jit
def slots(p_row0, p_row1, length0, length1, capacity0, capacity1, blocks0, block, N: gl.constexpr, SLOTS: gl.constexpr):
    """int32 slots of a block of N keys, in layout SLOTS; -1 for what is none, and in blocks behind the last."""
    inner = block < blocks0
    column = (block - gl.where(inner, 0, blocks0)) * N + gl.arange(0, N, SLOTS)
    live = column < gl.where(inner, length0, length1)
    slot = gl.load(gl.where(inner, p_row0, p_row1) + column, mask=live, other=-1, cache_modifier=".cg")
    return gl.where((slot >= 0) & (slot < gl.where(inner, capacity0, capacity1)), slot, -1).to(gl.int32)


@gluon.jit
def ask(pointers):
    """Ask the L2 cache for what lies there. Nothing is read, so that it need not be there yet."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask_for_keys(p_words, page_chunks, slot, log_page, LINES: gl.constexpr):
    """Ask the L2 cache for what is stored at `slot`, the first key in place of none: its lines, and that of its scales.

    In a row of LINES, a line for each of eight threads, the last of them the scales'.
    """
    row, scale = place_of(slot, page_chunks, log_page)
    ask_for_rows(p_words, row, scale, LINES)


@gluon.jit
def ask_for_rows(p_words, row, scale, LINES: gl.constexpr):
    """As `ask_for_keys`, of keys at a `place_of`."""
    o_line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LINES)), 0)
    data = gl.expand_dims(row, 1) + gl.minimum(o_line * LINE_WORDS, ROW_WORDS - 1)
    ask(p_words + gl.where(o_line == 7, gl.expand_dims(scale * SCALE_WORDS, 1), data))
