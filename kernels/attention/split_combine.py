"""Joins softmaxes over parts of the keys into one.

A part of a row of keys is its output, divided by its own denominator, and the base-2 logarithm of that denominator,
-inf where the part attends nothing. Weighted by 2^(part - joint), the parts add up to the whole. They are added CHUNK
at a time, and one part alone stays as it is.

Parts are float32, or, so that half as much moves, float16: the numbers of each half of the dims of a row in units of
the power of two that makes the largest finite one 2^14 or more, below 2^15. That rounds an eighth of what a bfloat16
output does, of whatever magnitude a row is; what is 2^-28 of the largest or less is rounded to 2^-39 of that.

A program takes a head of a token, and asks for all its parts at once. The last program of a token could do the same
without a second launch, but alone: 10 parts of 64 heads are 1.3 MB, which take 20,000 clocks of a multiprocessor at 64
bytes each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.gpu import register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_prologue
from .output_epilogue import DTYPES, store_rows
from .sparse_mla_decode_plan import Cut, Fusion, Results

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
CHUNK = 16
REGISTERS = 128
"""Most that a thread may have: told so, ptxas asks for all parts at once, and else, to keep registers, for two or three
at a time."""
WARPS = {torch.float32: 4, torch.float16: 2}
"""By dtype of the parts: a thread loads 16 bytes of 512 dims."""


class Parts(NamedTuple):
    """Parts of rows: values `[N, splits, H, D]`, lse `[N, splits, H]`, and, of float16, units `[N, splits, H, 2]`."""

    values: Tensor
    lse: Tensor
    unit: Tensor | None


def part_buffers(cut: Cut, heads: int, head_dim: int, like: Tensor) -> Parts:
    """Memory for the parts of a launch on the device of `like`, not initialised."""
    shape = cut.tokens, cut.splits, heads
    unit = like.new_empty((*shape, 2), dtype=torch.float32) if cut.dtype is torch.float16 else None
    return Parts(like.new_empty((*shape, head_dim), dtype=cut.dtype), like.new_empty(shape, dtype=torch.float32), unit)


@triton.jit
def finish_softmax(top, total, p_sink, stride_sink, o_head, m_head):
    """Factor that makes a sum of weighted values the output, and the natural lse, of rows with these maxima and sums.

    `top` is in base 2, -inf for a row without keys, whose factor is 0 and whose lse is +inf.
    """
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.where(total == 0, float("inf"), (shift + tl.log2(total)) * LN_2)
    if p_sink is not None:
        sink = tl.load(p_sink + o_head * stride_sink, mask=m_head, other=float("-inf"))
        factor = 1.0 / (total + tl.exp2(sink * LOG2_E - shift))
    else:
        factor = 1.0 / total
    return tl.where(total == 0, 0.0, factor), lse


@triton.jit
def part_softmax(top, total):
    """Factor that makes a sum of weighted values a part, and the part's logarithm, of rows with these tops and sums."""
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.where(total == 0, float("-inf"), shift + tl.log2(total))
    return tl.where(total == 0, 0.0, 1.0 / total), lse


@triton.jit(
    do_not_specialize=["parts", "first", "tokens", "padded_tokens", "max_pos"],
    do_not_specialize_on_alignment=["p_positions"],
)
def split_softmax_kernel(
    p_out,  # [T, H, D], or e4m3 [GROUPS, T, K]; see attention_rows.store_rows
    p_lse,  # [T, H] float32, neighbouring heads, or None
    p_scale,
    p_part,  # [tokens of this launch, parts, H, D] float32 or float16, contiguous
    p_part_lse,  # [tokens of this launch, parts, H] float32, contiguous
    p_part_unit,  # [tokens of this launch, parts, H, 2] float32, contiguous, or None for float32 parts
    p_sink,  # [H] float32 or None
    p_positions,
    p_table,
    out_strides,
    lse_stride,
    stride_sink,
    position_stride,
    table_strides,
    max_pos,
    parts,
    first,  # token of this launch
    tokens,
    padded_tokens,
    H: tl.constexpr,
    D: tl.constexpr,
    ROUND: tl.constexpr,  # dtype of attention's output
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,  # added at a time
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before its predecessor ends
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One program for each head of each token."""
    pdl_prologue(DEPENDENT)  # a projection behind it reads its weight meanwhile
    row = tl.program_id(0).to(tl.int64)
    local, head = row // H, row % H
    token = first + local
    # Dims of rows whose numbers have one unit.
    ROWS: tl.constexpr = 1 if p_part_unit is None else 2
    COLUMNS: tl.constexpr = BLOCK_D // ROWS
    o_row = tl.arange(0, ROWS)
    o_dim = (o_row * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    if INVERSE:
        # On their way together with the parts, not one after the other behind them.
        p_turn = p_table + table_row(tl.load(p_positions + token * position_stride), max_pos) * table_strides[0]
        cos, sin = load_cos_sin(p_turn, table_strides[1], True, BLOCK_D, ROPE)
    p_row = p_part + (local * parts * H + head) * D + o_dim
    p_row_lse = p_part_lse + local * parts * H + head
    top, total, acc = float("-inf"), 0.0, tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        lses, rows, units = (), (), ()
        for i in tl.static_range(chunk * PARTS, (chunk + 1) * PARTS):
            # One chunk has no part that is none.
            here = (i < parts) | (CHUNKS == 1)
            lses += (tl.load(p_row_lse + i * H, mask=here, other=float("-inf")),)  # type: ignore[assignment]
            rows += (tl.load(p_row + i * (H * D), mask=here & (o_dim < D), other=0.0),)  # type: ignore[assignment]
            if p_part_unit is not None:
                p_unit = p_part_unit + ((local * parts + i) * H + head) * ROWS + o_row
                units += (tl.load(p_unit, mask=here & (o_row >= 0), other=0.0),)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(PARTS):
            new_top = tl.maximum(new_top, lses[i])
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        if chunk > 0:
            rescale = tl.exp2(top - shift)
            total, acc = total * rescale, acc * rescale
        for i in tl.static_range(PARTS):
            weight = tl.exp2(lses[i] - shift)
            total += weight
            # Selected, for a part that attends nothing was not written, and may be NaN.
            part = tl.where(lses[i] > float("-inf"), rows[i], 0.0)
            if p_part_unit is not None:
                part = part.to(tl.float32) * tl.where(lses[i] > float("-inf"), units[i], 0.0)[:, None]
            acc += part * weight
        top = new_top
    factor, lse = finish_softmax(top, total, p_sink, stride_sink, head, True)
    if p_lse is not None:
        tl.store(p_lse + token * lse_stride + head, lse)
    # Rounded as attention rounds its output, whatever becomes of it.
    y = tl.reshape((acc * factor).to(ROUND), (1, BLOCK_D))
    if INVERSE:
        y = rotate(y.to(tl.float32), cos, -sin, ROPE)
    rope = p_positions, position_stride, p_table, table_strides, max_pos
    store_rows(
        y, p_out, out_strides, p_scale, (tokens, padded_tokens), token, head, rope,
        H, D, ROPE, False, GROUPS, GROUP_HEADS, PACKED,
    )  # fmt: skip


def split_softmax(
    into: Results,
    parts: Parts,
    sink: Tensor | None,
    fusion: Fusion,
    dtype: torch.dtype,
    first: int,
    end: int,
    dependent: bool,
) -> None:
    """Write the results of tokens `first` to `end` - 1.

    Args:
        parts: of these tokens.
        dtype: of attention's output. fusion: what becomes of it.
        dependent: whether it may start while its predecessor on the stream, a kernel that calls
            `gdc_launch_dependents`, still runs.
    """
    _, splits, heads, head_dim = parts.values.shape
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    launch_kernel(
        split_softmax_kernel,
        ((end - first) * heads,),
        into.out,
        into.lse,
        into.scale,
        *parts,
        sink,
        positions,
        table,
        into.strides(),
        into.lse_stride(),
        0 if sink is None else sink.stride(0),
        position_stride,
        table_strides,
        max_pos,
        splits,
        first,
        into.out.shape[0 if into.scale is None else 1],
        into.padded_tokens(),
        H=heads,
        D=head_dim,
        ROUND=DTYPES[dtype],
        BLOCK_D=triton.next_power_of_2(head_dim),
        PARTS=min(splits, CHUNK),
        CHUNKS=cdiv(splits, CHUNK),
        DEPENDENT=dependent,
        **fusion.constants(),
        num_warps=WARPS[parts.values.dtype],
        enable_fp_fusion=False,
        **register_limit(parts.lse.device, REGISTERS),
        **({"launch_pdl": True} if dependent else {}),
    )
