"""Joins softmaxes over parts of the keys into one.

A part of a row of keys is its output, divided by its own denominator, and the base-2 logarithm of that denominator,
-inf where the part attends nothing. Weighted by 2^(part - joint), the parts add up to the whole. They are added CHUNK
at a time, and one part alone stays as it is.

A program takes a head of a token. The last program of a token could do the same without a second launch, but alone: 10
parts of 64 heads are 1.3 MB, which take 20,000 clocks of a multiprocessor at 64 bytes each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv
from .attention_rows import DTYPES, store_rows
from .early import start
from .sparse_mla_decode_plan import Fusion, Results

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
CHUNK = 16


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
    p_part,  # [tokens of this launch, parts, H, D] float32, contiguous
    p_part_lse,  # [tokens of this launch, parts, H] float32, contiguous
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
    BLOCK_PARTS: tl.constexpr,  # added at a time
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before its predecessor ends
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One program for each head of each token."""
    start(DEPENDENT)  # a projection behind it reads its weight meanwhile
    row = tl.program_id(0).to(tl.int64)
    local, head = row // H, row % H
    token = first + local
    o_dim = tl.arange(0, BLOCK_D)
    top, total, acc = float("-inf"), 0.0, 0.0
    for chunk in tl.static_range(CHUNKS):
        o_part = chunk * BLOCK_PARTS + tl.arange(0, BLOCK_PARTS)
        o_row = (local * parts + o_part) * H + head
        # [BLOCK_PARTS]
        part_lse = tl.load(p_part_lse + o_row, mask=o_part < parts, other=float("-inf"))
        # [BLOCK_PARTS, BLOCK_D]
        m_part = (part_lse > float("-inf"))[:, None] & (o_dim < D)[None, :]
        part = tl.load(p_part + o_row[:, None] * D + o_dim[None, :], mask=m_part, other=0.0)
        here = tl.max(part_lse, 0)
        new_top = here if chunk == 0 else tl.maximum(top, here)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_lse - shift)
        new_total, new_acc = tl.sum(weight, 0), tl.sum(part * weight[:, None], 0)
        if chunk > 0:
            rescale = tl.exp2(top - shift)
            new_total, new_acc = total * rescale + new_total, acc * rescale + new_acc
        top, total, acc = new_top, new_total, new_acc
    factor, lse = finish_softmax(top, total, p_sink, stride_sink, head, True)
    if p_lse is not None:
        tl.store(p_lse + token * lse_stride + head, lse)
    # Rounded as attention rounds its output, whatever becomes of it.
    y = (acc * factor).to(ROUND)
    rope = p_positions, position_stride, p_table, table_strides, max_pos
    store_rows(
        tl.expand_dims(y, 0), p_out, out_strides, p_scale, (tokens, padded_tokens), token, head, rope,
        H, D, ROPE, INVERSE, GROUPS, GROUP_HEADS, PACKED,
    )  # fmt: skip


def split_softmax(
    into: Results,
    part: Tensor,
    part_lse: Tensor,
    sink: Tensor | None,
    fusion: Fusion,
    dtype: torch.dtype,
    first: int,
    end: int,
    dependent: bool,
) -> None:
    """Write the results of tokens `first` to `end` - 1.


    Args:
        part, part_lse: these tokens' parts, float32 `[>= N, splits, H, D]` and `[>= N, splits, H]`.
        dtype: of attention's output. fusion: what becomes of it.
        dependent: whether it may start while its predecessor on the stream, a kernel that calls
            `gdc_launch_dependents`, still runs.
    """
    _, parts, heads, head_dim = part.shape
    block_parts = CHUNK if fusion.batch_invariant else min(CHUNK, triton.next_power_of_2(parts))
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    split_softmax_kernel[((end - first) * heads,)](
        into.out,
        into.lse,
        into.scale,
        part,
        part_lse,
        sink,
        positions,
        table,
        into.strides(),
        into.lse_stride(),
        0 if sink is None else sink.stride(0),
        position_stride,
        table_strides,
        max_pos,
        parts,
        first,
        into.out.shape[0 if into.scale is None else 1],
        into.padded_tokens(),
        H=heads,
        D=head_dim,
        ROUND=DTYPES[dtype],
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_PARTS=block_parts,
        CHUNKS=cdiv(parts, block_parts),
        DEPENDENT=dependent,
        **fusion.constants(),
        enable_fp_fusion=False,
        **({"launch_pdl": True} if dependent else {}),
    )


def part_buffers(tokens: int, parts: int, heads: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Workspace of `split_softmax` on the device of `like`, not initialised."""
    part = torch.empty((tokens, parts, heads, head_dim), dtype=torch.float32, device=like.device)
    return part, torch.empty((tokens, parts, heads), dtype=torch.float32, device=like.device)
