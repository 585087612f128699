"""Joins softmaxes over parts of the keys into one.

A part of a row of keys is its output, divided by its own denominator, and the base-2 logarithm of that denominator,
-inf where the part attends nothing. Weighted by 2^(part - joint), the parts add up to the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


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


@triton.jit(do_not_specialize=["parts"])
def split_softmax_kernel(
    p_out,  # [T, H, D], contiguous
    p_lse,  # [T, H] float32, contiguous
    p_part,  # [T, parts, H, D] float32, contiguous
    p_part_lse,  # [T, parts, H] float32, contiguous
    p_sink,  # [H] float32 or None
    stride_sink,
    parts,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before its predecessor ends
):
    """One program for each head of each token."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    o_part, o_dim = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    o_row = (token * parts + o_part) * H + head
    # [BLOCK_PARTS]
    part_lse = tl.load(p_part_lse + o_row, mask=o_part < parts, other=float("-inf"))
    # [BLOCK_PARTS, BLOCK_D]
    m_part = (part_lse > float("-inf"))[:, None] & (o_dim < D)[None, :]
    part = tl.load(p_part + o_row[:, None] * D + o_dim[None, :], mask=m_part, other=0.0)
    top = tl.max(part_lse, 0)
    weight = tl.exp2(part_lse - tl.where(top == float("-inf"), 0.0, top))
    factor, lse = finish_softmax(top, tl.sum(weight, 0), p_sink, stride_sink, head, True)
    out = tl.sum(part * weight[:, None], 0) * factor
    tl.store(p_out + row * D + o_dim, out.to(p_out.dtype.element_ty), mask=o_dim < D)
    tl.store(p_lse + row, lse)


def split_softmax(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, sink: Tensor | None, dependent: bool
) -> None:
    """Write `out` `[T, H, D]` and `lse` `[T, H]` from parts float32 `[T, N, H, D]` and `[T, N, H]`; N * D is small.

    `dependent` lets it start while its predecessor on the stream, a kernel that calls `gdc_launch_dependents`, runs.
    """
    tokens, heads, head_dim = out.shape
    split_softmax_kernel[(tokens * heads,)](
        out,
        lse,
        part,
        part_lse,
        sink,
        0 if sink is None else sink.stride(0),
        part.shape[1],
        H=heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_PARTS=triton.next_power_of_2(part.shape[1]),
        DEPENDENT=dependent,
        **({"launch_pdl": True} if dependent else {}),
    )


def part_buffers(tokens: int, parts: int, heads: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Workspace of `split_softmax` on the device of `like`, not initialised."""
    part = torch.empty((tokens, parts, heads, head_dim), dtype=torch.float32, device=like.device)
    return part, torch.empty((tokens, parts, heads), dtype=torch.float32, device=like.device)
