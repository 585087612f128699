"""`combine_topk_swa` and `combine_topk_swa_ragged`: a program per token writes its row.

A token's row starts in the list at the sum of the lengths before it. The length of a row follows from the token's
position alone, so the sum over a request has a closed form, and a program adds one number per request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import INDEX_ALIGN, PAD_INDEX, align_up
from ...reference.metadata.combine_topk_swa import CombineTopkArguments
from ..host.launch import launch_kernel

MAX_COLUMNS = 1024
"""Columns that a program writes at a time."""
PAD = tl.constexpr(PAD_INDEX)
REQUESTS = tl.constexpr(128)  # looked at together
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)


class Shape(NamedTuple):
    """Compile-time sizes of a launch: window, ratio and topk of the op, width of a row, columns written at a time."""

    window: int
    ratio: int
    topk: int
    width: int
    columns: int


@triton.jit
def _request_of(p_starts, starts_stride, token, requests):
    """Return the request whose query holds int64 `token`; `requests` after the last one."""
    count = tl.zeros((REQUESTS,), tl.int32)
    for first in range(0, requests, REQUESTS):
        o_request = first + tl.arange(0, REQUESTS)
        m_request = o_request < requests
        end = tl.load(p_starts + (o_request + 1).to(tl.int64) * starts_stride, mask=m_request, other=0).to(tl.int64)
        count += (m_request & (end <= token)).to(tl.int32)
    return tl.sum(count, axis=0).to(tl.int64)


@triton.jit
def _indices_below(position, WINDOW: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr):
    """Return the number of indices of the tokens at positions 0 to int64 `position` - 1; 0 below position 1."""
    tokens = tl.maximum(position, 0)
    short = tl.minimum(tokens, WINDOW)
    raw = short * (short + 1) // 2 + (tokens - short) * WINDOW
    # Up to here a token sees (its position + 1) // RATIO entries, and TOPK from here on.
    growing = tl.minimum(tokens, RATIO * TOPK)
    groups = growing // RATIO
    entries = RATIO * (groups * (groups - 1) // 2) + groups * (growing - groups * RATIO + 1)
    return raw + entries + (tokens - growing) * TOPK


@triton.jit
def _indices_before(
    p_starts, starts_stride, p_seq_lens, seq_lens_stride, token, requests,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Return the number of indices of all tokens before int64 `token`, int64."""
    sums = tl.zeros((REQUESTS,), tl.int64)
    for first in range(0, requests, REQUESTS):
        o_request = first + tl.arange(0, REQUESTS)
        m_request = o_request < requests
        p_start = p_starts + o_request.to(tl.int64) * starts_stride
        start = tl.load(p_start, mask=m_request, other=0).to(tl.int64)
        end = tl.load(p_start + starts_stride, mask=m_request, other=0).to(tl.int64)
        p_seq_len = p_seq_lens + o_request.to(tl.int64) * seq_lens_stride
        seq_len = tl.load(p_seq_len, mask=m_request, other=0).to(tl.int64)
        # Positions are counted back from the end of the query.
        reached = tl.minimum(tl.maximum(token, start), end) - end + seq_len
        before = _indices_below(reached, WINDOW, RATIO, TOPK) - _indices_below(
            start - end + seq_len, WINDOW, RATIO, TOPK
        )
        sums += tl.where(m_request, before, 0)
    return tl.sum(sums, axis=0)


@triton.jit(
    do_not_specialize=["tokens", "requests", "m", "n"],
    do_not_specialize_on_alignment=["p_starts", "p_seq_lens", "p_gather_lens"],
)
def combine_topk_swa_kernel(
    outputs,  # rows [T, width] or [T * (topk + window)], lens [T], indptr [T + 1] or None; int32, contiguous
    p_topk,  # [T, >= topk] int
    p_starts,  # [requests + 1] int
    p_seq_lens,  # [requests] int
    p_gather_lens,  # [requests] int
    strides,  # of the four inputs
    tokens,
    requests,
    m,
    n,
    SHAPE: tl.constexpr,
):
    """Write the row of token p in program p."""
    p_rows, p_lens, p_indptr = outputs
    topk_strides, starts_stride, seq_lens_stride, gather_lens_stride = strides
    WINDOW: tl.constexpr = SHAPE.window
    RATIO: tl.constexpr = SHAPE.ratio
    TOPK: tl.constexpr = SHAPE.topk
    WIDTH: tl.constexpr = SHAPE.width
    COLUMNS: tl.constexpr = SHAPE.columns
    row = tl.program_id(0).to(tl.int64)
    origin = tl.load(p_starts).to(tl.int64)
    token = origin + row
    request = _request_of(p_starts, starts_stride, token, requests)
    known = request < requests
    request = tl.where(known, request, 0)
    end = tl.load(p_starts + (request + 1) * starts_stride, mask=known, other=0).to(tl.int64)
    seq_len = tl.load(p_seq_lens + request * seq_lens_stride, mask=known, other=0).to(tl.int64)
    gathered = tl.load(p_gather_lens + request * gather_lens_stride, mask=known, other=0).to(tl.int64)
    position = tl.where(known, tl.maximum(token - end + seq_len, -1), -1)
    num_entries = tl.minimum((position + 1) // RATIO, TOPK)
    num_raw = tl.minimum(position + 1, WINDOW)
    length = num_entries + num_raw
    tl.store(p_lens + row, length.to(tl.int32))

    if p_indptr is None:
        p_row, written = p_rows + row * WIDTH, WIDTH
    else:
        first = _indices_before(
            p_starts, starts_stride, p_seq_lens, seq_lens_stride, token, requests, WINDOW, RATIO, TOPK
        )
        total = _indices_before(
            p_starts, starts_stride, p_seq_lens, seq_lens_stride, origin + tokens, requests, WINDOW, RATIO, TOPK
        )
        p_row, written = p_rows + first, length
        tl.store(p_indptr + row, first.to(tl.int32))
        tl.store(p_indptr + tokens, total.to(tl.int32), mask=row == tokens - 1)
        # The places that a row leaves of WIDTH form the list's tail, in the order of the rows.
        p_tail = p_rows + total + (row * WIDTH - first)
        for start in range(0, WIDTH, COLUMNS):
            o_column = start + tl.arange(0, COLUMNS)
            tl.store(p_tail + o_column, PAD, mask=o_column < WIDTH - length)

    oldest = position - num_raw + 1 - (seq_len - gathered)
    for start in range(0, WIDTH, COLUMNS):
        o_column = start + tl.arange(0, COLUMNS)
        is_entry = o_column < num_entries
        p_entry = p_topk + row * topk_strides[0] + o_column.to(tl.int64) * topk_strides[1]
        entry = tl.load(p_entry, mask=is_entry, other=PAD).to(tl.int64)
        raw = oldest + o_column - num_entries
        is_raw = (o_column >= num_entries) & (o_column < length)
        is_raw &= (raw >= 0) & (raw < tl.minimum(gathered, m - n))
        place = tl.where(is_entry & (entry >= 0) & (entry < n), entry, tl.where(is_raw, raw + n, PAD))
        place = tl.where(place >= 0, place + request * m, PAD)
        place = tl.where(place <= LAST_INDEX, place, PAD)
        tl.store(p_row + o_column, place.to(tl.int32), mask=o_column < written)


def combine_topk_swa(op: CombineTopkArguments) -> tuple[Tensor, Tensor]:
    """Launch `combine_topk_swa`; the results equal the reference."""
    tokens, width = op.topk_indices.shape[0], align_up(op.topk + op.window, INDEX_ALIGN)
    rows = op.topk_indices.new_empty((tokens, width), dtype=torch.int32)
    lens = op.topk_indices.new_empty((tokens,), dtype=torch.int32)
    _launch(op, (rows, lens, None), width)
    return rows, lens


def combine_topk_swa_ragged(op: CombineTopkArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `combine_topk_swa_ragged`; the results equal the reference."""
    tokens, width = op.topk_indices.shape[0], op.topk + op.window
    flat = op.topk_indices.new_empty((tokens * width,), dtype=torch.int32)
    indptr = op.topk_indices.new_empty((tokens + 1,), dtype=torch.int32)
    lens = op.topk_indices.new_empty((tokens,), dtype=torch.int32)
    if tokens == 0:
        return flat, indptr.zero_(), lens
    _launch(op, (flat, lens, indptr), width)
    return flat, indptr, lens


def _launch(op: CombineTopkArguments, outputs: tuple[Tensor, Tensor, Tensor | None], width: int) -> None:
    tokens, columns = op.topk_indices.shape[0], min(MAX_COLUMNS, triton.next_power_of_2(width))
    if tokens == 0:
        return
    launch_kernel(
        combine_topk_swa_kernel,
        (tokens,),
        outputs,
        op.topk_indices,
        op.query_start_loc,
        op.seq_lens,
        op.gather_lens,
        (op.topk_indices.stride(), op.query_start_loc.stride(0), op.seq_lens.stride(0), op.gather_lens.stride(0)),
        tokens,
        op.seq_lens.shape[0],
        op.m,
        op.n,
        SHAPE=Shape(op.window, op.ratio, op.topk, width, columns),
        num_warps=min(4, max(1, columns // 128)),
    )
