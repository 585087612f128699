"""`ragged_from_dense` and `global_topk_ragged`: rows of indices as one list, in two launches.

The first launch counts the indices of each row, the second writes the list: a program adds the counts before its row,
which replaces a scan over all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX
from ..host.launch import launch_kernel

MAX_COLUMNS = 1024
"""Columns that a program looks at together."""
COUNTS = tl.constexpr(1024)  # of rows, added up together
PAD = tl.constexpr(PAD_INDEX)


@triton.jit(do_not_specialize_on_alignment=["p_lens"])
def count_rows_kernel(
    p_counts,  # [T] int32, contiguous
    p_rows,  # [T, W] int
    p_lens,  # [T] int
    row_strides,
    len_stride,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count the indices of row p in program p."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lens + row * len_stride)
    count = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, W, COLUMNS):
        o_w = start + tl.arange(0, COLUMNS)
        index = tl.load(
            p_rows + row * row_strides[0] + o_w.to(tl.int64) * row_strides[1],
            mask=(o_w < W) & (o_w < length),
            other=PAD,
        )
        count += (index >= 0).to(tl.int32)
    tl.store(p_counts + row, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["p_lens"])
def pack_rows_kernel(
    outputs,  # list [T * W] and indptr [T + 1], int32, contiguous
    p_rows,  # [T, W] int
    p_counts,  # [T] int32, contiguous
    p_lens,  # [T] int; None if a row counts in full or is empty
    row_strides,
    len_stride,
    tokens,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write row p of the list and its start, and pad as many elements of the list's tail as the row lacks."""
    p_flat, p_indptr = outputs
    row = tl.program_id(0).to(tl.int64)
    # [COUNTS]
    before, all_rows = tl.zeros((COUNTS,), tl.int64), tl.zeros((COUNTS,), tl.int64)
    for start in range(0, tokens, COUNTS):
        o_t = start + tl.arange(0, COUNTS)
        counts = tl.load(p_counts + o_t, mask=o_t < tokens, other=0).to(tl.int64)
        before += tl.where(o_t < row, counts, 0)
        all_rows += counts
    first, total = tl.sum(before, axis=0), tl.sum(all_rows, axis=0)
    count = tl.load(p_counts + row)
    tl.store(p_indptr + row, first.to(tl.int32))
    tl.store(p_indptr + tokens, total.to(tl.int32), mask=row == tokens - 1)

    limit = W
    if p_lens is not None:
        limit = tl.load(p_lens + row * len_stride)
    p_out = p_flat + first
    p_tail = p_flat + total + (row * W - first)
    written = 0
    for start in range(0, W, COLUMNS):
        # [COLUMNS]
        o_w = start + tl.arange(0, COLUMNS)
        index = tl.load(
            p_rows + row * row_strides[0] + o_w.to(tl.int64) * row_strides[1],
            mask=(o_w < W) & (o_w < limit) & (count > 0),
            other=PAD,
        )
        keep = (index >= 0).to(tl.int32)
        place = written + tl.cumsum(keep, axis=0) - keep
        tl.store(p_out + place, index.to(tl.int32), mask=keep != 0)
        written += tl.sum(keep, axis=0)
        tl.store(p_tail + o_w, PAD, mask=o_w < W - count)


def ragged_from_dense(indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `ragged_from_dense`; the results equal the reference."""
    tokens, width = indices.shape[0], indices.shape[-1]
    counts = indices.new_empty((tokens,), dtype=torch.int32)
    if tokens > 0:
        columns = _columns(width)
        launch_kernel(
            count_rows_kernel,
            (tokens,),
            counts,
            indices,
            lens,
            (indices.stride(0), indices.stride(-1)),
            lens.stride(0),
            W=width,
            COLUMNS=columns,
            num_warps=_warps(columns),
        )
    return pack(indices, counts, lens)


def pack(rows: Tensor, counts: Tensor, lens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `flat` and `indptr` of `rows` `[T, W]`; row t keeps `counts[t]` indices."""
    tokens, width = rows.shape[0], rows.shape[-1]
    flat = rows.new_empty((tokens * width,), dtype=torch.int32)
    if tokens == 0:
        return flat, counts.new_zeros((1,))
    indptr = counts.new_empty((tokens + 1,))
    columns = _columns(width)
    launch_kernel(
        pack_rows_kernel,
        (tokens,),
        (flat, indptr),
        rows,
        counts,
        lens,
        (rows.stride(0), rows.stride(-1)),
        0 if lens is None else lens.stride(0),
        tokens,
        W=width,
        COLUMNS=columns,
        num_warps=_warps(columns),
    )
    return flat, indptr


def _columns(width: int) -> int:
    return min(MAX_COLUMNS, triton.next_power_of_2(max(width, 1)))


def _warps(columns: int) -> int:
    return min(4, max(1, columns // 128))
