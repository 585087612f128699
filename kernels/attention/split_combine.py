"""Split the keys of a token among programs, and combine their partial softmaxes.

A row of `n` blocks of keys has min(splits, ceil(n / min_blocks)) splits of equal size, so that a short row has fewer.
`split_plan` takes as many as fill the GPU, and no more than make the largest split as small as it can be. A
batch-invariant call takes splits of INVARIANT_KEYS keys, so that a row's splits follow from its own length.

A partial result is an output divided by its own denominator, and the base-2 logarithm of that denominator, -inf where
nothing is attended. Weighted by 2^(partial lse - total lse), the partial outputs add up to the whole, CHUNK at a time;
one alone stays as it is. They are float32, or float16 to halve the traffic: each half of the dims of a row in units of
the power of two that brings its largest finite number into [2^14, 2^15). The rounding error is an eighth of that of a
bfloat16 output; numbers of 2^-28 of the largest or less are rounded to 2^-39 of it.

The combine kernels run one program for each head of each token: one loads CHUNK partial results at a time, the other,
for the decode kernels for sm_90 and rows of many splits, all of them at once, with more warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.gpu import Gpu, register_limit
from ..host.launch import DTYPES, launch_kernel
from ..host.pdl import pdl_option, pdl_prologue
from .common import Epilogue, FusedParts, OutputRows, Outputs, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INVARIANT_KEYS = 256
MAX_PARTIAL_BYTES = 256 * 2**20
"""Memory of the partial results of a launch. More tokens than fit take more launches."""
CHUNK = 16
MAX_REGISTERS = 128
"""Register limit of the combine kernel: with it, ptxas issues the loads of all partial results before the first use."""
AT_ONCE_WARPS, MAX_AT_ONCE = 8, 72
"""Warps of a program that combines all partial results at once, and most of those."""
SM_REGISTERS = 65536
WARPS = {torch.float32: 4, torch.float16: 2}
"""Warps by dtype of the partial results, so that a thread loads 16 bytes of 512 dims."""


class SplitPlan(NamedTuple):
    """How a call is launched.

    Attributes:
        splits: most splits of a row. min_blocks: fewest blocks of keys in a split of several.
        tokens: most tokens of a launch. dtype: of the partial results.
    """

    splits: int
    min_blocks: int
    tokens: int
    dtype: torch.dtype = torch.float32

    @property
    def combined(self) -> tuple[int, int] | None:
        """Partial results that the combine kernel loads at a time, and how often; None if rows are not split."""
        return None if self.splits == 1 else (min(self.splits, CHUNK), cdiv(self.splits, CHUNK))

    @property
    def variant(self) -> tuple[Any, ...]:
        """The part of the plan that kernels are compiled for."""
        return self.combined, self.dtype


class Sizes(NamedTuple):
    """Compile-time sizes of a launch that combines all partial results at once.

    Attributes:
        heads, dim, padded_dim: of a row. dtype: of attention's output, before it is rotated or quantised.
        slots, tiles: splits that are loaded by one instruction, and how many of these. padded_splits: a power of two.
    """

    heads: int
    dim: int
    padded_dim: int
    dtype: tl.dtype
    slots: int
    tiles: int
    padded_splits: int


class Partials(NamedTuple):
    """Partial results: values `[N, splits, H, D]`, lse `[N, splits, H]`, and for float16 units `[N, splits, H, 2]`."""

    values: Tensor
    lse: Tensor
    unit: Tensor | None


def split_plan(
    shape: tuple[int, ...],
    head_blocks: int,
    blocks: int,
    block_n: int,
    gpu: Gpu,
    splits: int = 0,
    invariant: bool = False,
    float16: bool = False,
) -> SplitPlan:
    """Plan the launches for outputs `[T, H, D]` and rows of at most `blocks` blocks of `block_n` keys.

    Args:
        splits: overrules the number that fills the GPU.
        float16: the kernel can store float16 partial results. Batch-invariant calls do not use them: a row's bits must
            not depend on whether it is split.
    """
    tokens, heads, head_dim = shape
    min_blocks = 1
    if splits == 0 and invariant:
        min_blocks = max(1, INVARIANT_KEYS // block_n)
        splits = max(1, cdiv(blocks, min_blocks))
    splits = splits or split_count(tokens * head_blocks, blocks, gpu)
    if splits == 1:
        return SplitPlan(1, min_blocks, tokens)
    dtype = torch.float16 if float16 and not invariant else torch.float32
    most = max(1, MAX_PARTIAL_BYTES // (dtype.itemsize * splits * heads * head_dim))
    return SplitPlan(splits, min_blocks, min(tokens, most), dtype)


def split_count(programs: int, blocks: int, gpu: Gpu) -> int:
    """Return into how many splits the `blocks` of a token's keys go, so that `programs` fill the GPU at most once.

    The fewest with the smallest possible maximum: 18 blocks on 8 SMs make 6 splits of 3 blocks.
    """
    most = max(1, gpu.sms // programs)
    return max(1, cdiv(blocks, max(1, cdiv(blocks, most))))


def warps_at_once(splits: int) -> int:
    """Return the warps of a program that combines so many splits at once; 0 to combine CHUNK at a time.

    Up to CHUNK are one round of loads in any case. Batch-invariant calls do not ask: the order of a row's sums must not
    depend on the number of splits of the longest one.
    """
    return AT_ONCE_WARPS if CHUNK < splits <= MAX_AT_ONCE else 0


def new_partials(plan: SplitPlan, heads: int, head_dim: int, like: Tensor) -> Partials | None:
    """Allocate the partial results of a launch on the device of `like`; None if rows are not split."""
    if plan.splits == 1:
        return None
    shape = plan.tokens, plan.splits, heads
    unit = like.new_empty((*shape, 2), dtype=torch.float32) if plan.dtype is torch.float16 else None
    values = like.new_empty((*shape, head_dim), dtype=plan.dtype)
    return Partials(values, like.new_empty(shape, dtype=torch.float32), unit)


@triton.jit
def finish_softmax(top, total, p_sink, stride_sink, o_head, m_head):
    """Return the factor that turns a sum of weighted values into the output, and the natural lse, of rows.

    `top` is the largest score in base 2, -inf for a row without keys, whose factor is 0 and whose lse is +inf; `total`
    is the sum of weights.
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
def partial_softmax(top, total):
    """Return the factor that turns a sum of weighted values into a partial output, and its base-2 lse."""
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.where(total == 0, float("-inf"), shift + tl.log2(total))
    return tl.where(total == 0, 0.0, 1.0 / total), lse


@triton.jit(
    do_not_specialize=["splits", "first_token", "tokens", "padded_tokens", "max_pos"],
    do_not_specialize_on_alignment=["p_positions"],
)
def combine_splits_kernel(
    p_out,  # [T, H, D], or e4m3 [groups, T, K]; see common.store_rows
    p_lse,  # [T, H] float32, contiguous heads, or None
    p_scale,
    p_partial,  # [tokens of this launch, splits, H, D] float32 or float16, contiguous
    p_partial_lse,  # [tokens of this launch, splits, H] float32, contiguous
    p_partial_unit,  # [tokens of this launch, splits, H, 2] float32, contiguous, or None for float32 partial results
    p_sink,  # [H] float32 or None
    p_positions,
    p_table,
    out_strides,
    lse_stride,
    stride_sink,
    position_stride,
    table_strides,
    max_pos,
    splits,
    first_token,  # of this launch
    tokens,
    padded_tokens,
    H: tl.constexpr,
    D: tl.constexpr,
    ROUND: tl.constexpr,  # dtype of attention's output
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,  # added at a time
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,  # launched before the previous kernel ends
    EPILOGUE: tl.constexpr,
):
    """Combine the partial results of one head of one token."""
    pdl_prologue(PDL)  # lets a following projection prefetch its weight
    row = tl.program_id(0).to(tl.int64)
    local, head = row // H, row % H
    token = first_token + local
    # Dims of a row that share one unit.
    ROWS: tl.constexpr = 1 if p_partial_unit is None else 2
    COLUMNS: tl.constexpr = BLOCK_D // ROWS
    o_row = tl.arange(0, ROWS)
    o_dim = (o_row * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    if EPILOGUE.inverse:
        # Before the partial results, so that both are in flight at the same time.
        p_turn = p_table + table_row(tl.load(p_positions + token * position_stride), max_pos) * table_strides[0]
        cos, sin = load_cos_sin(p_turn, table_strides[1], True, BLOCK_D, EPILOGUE.rope)
    p_row = p_partial + (local * splits * H + head) * D + o_dim
    p_row_lse = p_partial_lse + local * splits * H + head
    top, total, acc = float("-inf"), 0.0, tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        lses, rows, units = (), (), ()
        for i in tl.static_range(chunk * SPLITS, (chunk + 1) * SPLITS):
            # A single chunk is full.
            here = (i < splits) | (CHUNKS == 1)
            lses += (tl.load(p_row_lse + i * H, mask=here, other=float("-inf")),)  # type: ignore[assignment]
            rows += (tl.load(p_row + i * (H * D), mask=here & (o_dim < D), other=0.0),)  # type: ignore[assignment]
            if p_partial_unit is not None:
                p_unit = p_partial_unit + ((local * splits + i) * H + head) * ROWS + o_row
                units += (tl.load(p_unit, mask=here & (o_row >= 0), other=0.0),)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(SPLITS):
            new_top = tl.maximum(new_top, lses[i])
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        if chunk > 0:
            rescale = tl.exp2(top - shift)
            total, acc = total * rescale, acc * rescale
        for i in tl.static_range(SPLITS):
            weight = tl.exp2(lses[i] - shift)
            total += weight
            # Selected, because a split that attends nothing was not written and may be NaN.
            part = tl.where(lses[i] > float("-inf"), rows[i], 0.0)
            if p_partial_unit is not None:
                part = part.to(tl.float32) * tl.where(lses[i] > float("-inf"), units[i], 0.0)[:, None]
            acc += part * weight
        top = new_top
    factor, lse = finish_softmax(top, total, p_sink, stride_sink, head, True)
    if p_lse is not None:
        tl.store(p_lse + token * lse_stride + head, lse)
    # Rounded as attention rounds its output, before it is rotated or quantised.
    y = tl.reshape((acc * factor).to(ROUND), (1, BLOCK_D))
    if EPILOGUE.inverse:
        y = rotate(y.to(tl.float32), cos, -sin, EPILOGUE.rope)
    store_rows(y, OutputRows(p_out, out_strides, p_scale, tokens, padded_tokens), token, head, H, D, EPILOGUE)


@triton.jit
def combine_at_once_kernel(
    outputs,  # out, lse and scale, as those of combine_splits_kernel
    partials,  # values, lse and unit, as those of combine_splits_kernel
    p_sink,  # [H] float32 or None
    rope,  # positions and table
    strides,  # of outputs [T, H, D], the lse's tokens, sinks, positions and the table
    counts,  # max_pos, splits, the launch's first token, tokens and padded tokens
    SIZES: tl.constexpr,
    PDL: tl.constexpr,  # launched before the previous kernel ends
    EPILOGUE: tl.constexpr,
):
    """Combine the partial results of one head of one token, which are all loaded before the first is used."""
    pdl_prologue(PDL)
    p_out, p_lse, p_scale = outputs
    p_partial, p_partial_lse, p_partial_unit = partials
    p_positions, p_table = rope
    out_token_stride, out_head_stride, lse_stride, stride_sink, position_stride, row_stride, column_stride = strides
    max_pos, splits, first_token, tokens, padded_tokens = counts
    H: tl.constexpr = SIZES.heads
    D: tl.constexpr = SIZES.dim
    BLOCK_D: tl.constexpr = SIZES.padded_dim
    SLOTS: tl.constexpr = SIZES.slots
    TILES: tl.constexpr = SIZES.tiles
    PADDED: tl.constexpr = SIZES.padded_splits
    ROUND: tl.constexpr = SIZES.dtype
    row = tl.program_id(0).to(tl.int64)
    local, head = row // H, row % H
    token = first_token + local
    # Dims of a row that share one unit.
    ROWS: tl.constexpr = 1 if p_partial_unit is None else 2
    COLUMNS: tl.constexpr = BLOCK_D // ROWS
    o_row = tl.arange(0, ROWS)
    o_dim = (o_row * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    if EPILOGUE.inverse:
        p_turn = p_table + table_row(tl.load(p_positions + token * position_stride), max_pos) * row_stride
        cos, sin = load_cos_sin(p_turn, column_stride, True, BLOCK_D, EPILOGUE.rope)
    p_row = p_partial + (local * splits * H + head) * D + o_dim[None, :, :]
    p_row_lse = p_partial_lse + local * splits * H + head
    o_split = tl.arange(0, PADDED)
    every = tl.load(p_row_lse + o_split * H, mask=o_split < splits, other=float("-inf"))
    lses, rows, units = (), (), ()
    for i in tl.static_range(TILES):
        split = i * SLOTS + tl.arange(0, SLOTS)
        here = split < splits
        lses += (tl.load(p_row_lse + split * H, mask=here, other=float("-inf")),)  # type: ignore[assignment]
        m_row = here[:, None, None] & (o_dim < D)[None, :, :]
        rows += (tl.load(p_row + (split * (H * D))[:, None, None], mask=m_row, other=0.0),)  # type: ignore[assignment]
        if p_partial_unit is not None:
            p_unit = p_partial_unit + ((local * splits + split) * H + head)[:, None] * ROWS + o_row[None, :]
            units += (tl.load(p_unit, mask=here[:, None], other=0.0),)  # type: ignore[assignment]
    top = tl.max(every)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(every - shift))
    acc = tl.zeros([SLOTS, ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TILES):
        live = lses[i] > float("-inf")
        weight = tl.exp2(lses[i] - shift)
        # Selected, because a split that attends nothing was not written and may be NaN.
        share = tl.where(live[:, None, None], rows[i], 0.0)  # type: ignore[index]
        if p_partial_unit is not None:
            share = share.to(tl.float32) * tl.where(live[:, None], units[i], 0.0)[:, :, None]  # type: ignore[index]
        acc += share * weight[:, None, None]
    factor, lse = finish_softmax(top, total, p_sink, stride_sink, head, True)
    if p_lse is not None:
        tl.store(p_lse + token * lse_stride + head, lse)
    y = tl.reshape((tl.sum(acc, 0) * factor).to(ROUND), (1, BLOCK_D))
    if EPILOGUE.inverse:
        y = rotate(y.to(tl.float32), cos, -sin, EPILOGUE.rope)
    out = OutputRows(p_out, (out_token_stride, out_head_stride), p_scale, tokens, padded_tokens)
    store_rows(y, out, token, head, H, D, EPILOGUE)


def combine_splits(
    into: Outputs,
    partials: Partials,
    sink: Tensor | None,
    fused: FusedParts,
    dtype: torch.dtype,
    tokens: tuple[int, int],
    pdl: bool,
    at_once: int = 0,
) -> None:
    """Write the outputs of a range of tokens.

    Args:
        partials: of these tokens, from the first to before the second of `tokens`.
        dtype: of attention's output, before `fused` rotates or quantises it.
        pdl: the previous kernel on the stream calls `gdc_launch_dependents`, and this one may start while it runs.
        at_once: warps of a program that loads all partial results at once, a power of two; 0 loads CHUNK at a time.
    """
    _, splits, heads, head_dim = partials.values.shape
    positions, position_stride, table, table_strides, max_pos = fused.rope()
    epilogue: Epilogue = fused.epilogue()
    programs, padded_dim = ((tokens[1] - tokens[0]) * heads,), triton.next_power_of_2(head_dim)
    lse_stride, stride_sink = into.lse_stride(), 0 if sink is None else sink.stride(0)
    counts = splits, tokens[0], into.tokens(), into.padded_tokens()
    options = {"PDL": pdl, "EPILOGUE": epilogue, "enable_fp_fusion": False, **pdl_option(pdl)}
    device = partials.lse.device
    if at_once:
        padded_splits = triton.next_power_of_2(splits)
        launch_kernel(
            combine_at_once_kernel,
            programs,
            (into.out, into.lse, into.scale),
            tuple(partials),
            sink,
            (positions, table),
            (*into.strides(), lse_stride, stride_sink, position_stride, *table_strides),
            (max_pos, *counts),
            SIZES=Sizes(heads, head_dim, padded_dim, DTYPES[dtype], at_once, cdiv(splits, at_once), padded_splits),
            num_warps=at_once,
            **register_limit(device, min(255, SM_REGISTERS // (32 * at_once))),
            **options,
        )
        return
    launch_kernel(
        combine_splits_kernel,
        programs,
        into.out,
        into.lse,
        into.scale,
        *partials,
        sink,
        positions,
        table,
        into.strides(),
        lse_stride,
        stride_sink,
        position_stride,
        table_strides,
        max_pos,
        *counts,
        H=heads,
        D=head_dim,
        ROUND=DTYPES[dtype],
        BLOCK_D=padded_dim,
        SPLITS=min(splits, CHUNK),
        CHUNKS=cdiv(splits, CHUNK),
        num_warps=WARPS[partials.values.dtype],
        **register_limit(device, MAX_REGISTERS),
        **options,
    )
