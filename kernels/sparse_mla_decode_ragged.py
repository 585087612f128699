"""`sparse_mla_decode_ragged`: lists become padded rows in one small launch, which the kernel of `sparse_mla_decode`
attends.

The rows are 4 bytes for each of T * max_entries, written once and read once: a thousandth of the keys they select. So
a list gets that kernel's splits and its Hopper form, and costs one launch more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import PAD_INDEX, cdiv
from .early import start
from .gpu import early_start, gpu_of, starts_early
from .launch import launch_kernel
from .sparse_mla_decode import sparse_mla_decode, sparse_mla_decode_refuses

COLUMNS = 256
"""Columns of a row that a program writes."""
MAX_ROWS_NUMEL = 2**28
MOST_EARLY = 32
"""Programs up to which rows start early: attention of so few tokens is launched while they are written, which takes 0.6
us off a call on an H200. Behind more of them attention starts when they have ended, and took 1.5 us longer."""
PAD = tl.constexpr(PAD_INDEX)
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def _write_row(
    p_rows, p_lens, p_indices, p_indptr, index_stride, indptr_stride, capacity, width, token, block,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns `block * COLUMNS` and on of row `token`, and its length."""
    begin = tl.load(p_indptr + token * indptr_stride).to(tl.int64)
    end = tl.load(p_indptr + (token + 1) * indptr_stride).to(tl.int64)
    o_column = block * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < width
    place = begin + o_column
    inside = m_column & (place >= 0) & (place < capacity) & (place < end)
    slot = tl.load(p_indices + tl.where(inside, place, 0) * index_stride, mask=inside, other=PAD).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot <= LAST_INDEX), slot, PAD)
    tl.store(p_rows + token * width + o_column, slot.to(tl.int32), mask=m_column)
    length = tl.minimum(tl.maximum(end - begin, 0), width)
    tl.store(p_lens + token, length.to(tl.int32), mask=block == 0)


@triton.jit(
    do_not_specialize=["capacity0", "capacity1", "width0", "width1", "blocks0", "blocks"],
    do_not_specialize_on_alignment=["p_indptr0", "p_indptr1"],
)
def dense_rows_kernel(
    p_rows0,  # [T, width0] int32, contiguous
    p_lens0,  # [T] int32, contiguous
    p_rows1,  # [T, width1] int32, contiguous
    p_lens1,  # [T] int32, contiguous
    p_indices0,  # [capacity0] int
    p_indptr0,  # [> T] int
    p_indices1,  # [capacity1] int
    p_indptr1,  # [> T] int
    index_stride0,
    indptr_stride0,
    index_stride1,
    indptr_stride1,
    capacity0,
    capacity1,
    width0,
    width1,
    blocks0,  # programs of a token that write the first list's row; the others write the second's
    blocks,  # programs of a token
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program p writes block p % blocks of token p // blocks, blocks of the first list in front."""
    start(EARLY)  # attention may be launched while rows are written: it waits before it reads them
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < blocks0:
        _write_row(
            p_rows0, p_lens0, p_indices0, p_indptr0, index_stride0, indptr_stride0, capacity0, width0, token, block,
            COLUMNS,
        )  # fmt: skip
    else:
        _write_row(
            p_rows1, p_lens1, p_indices1, p_indptr1, index_stride1, indptr_stride1, capacity1, width1, token,
            block - blocks0, COLUMNS,
        )  # fmt: skip


def dense_rows(
    tokens: int, first: tuple[Tensor, Tensor, int], second: tuple[Tensor, Tensor, int] | None
) -> tuple[Tensor, ...]:
    """Rows int32 `[T, W]` and lengths int32 `[T]` of one or two lists, each `indices`, `indptr` and the width W."""
    made = [
        (indices.new_empty((tokens, width), dtype=torch.int32), indices.new_empty((tokens,), dtype=torch.int32))
        for indices, _, width in ((first,) if second is None else (first, second))
    ]
    if tokens > 0:
        lists = (first, first if second is None else second)
        blocks = [max(1, cdiv(width, COLUMNS)) for _, _, width in lists]
        programs = blocks[0] + (0 if second is None else blocks[1])
        early = tokens * programs <= MOST_EARLY and starts_early(gpu_of(made[0][0].device))
        # One dimension: the others of a grid end at 65,535.
        launch_kernel(
            dense_rows_kernel,
            (tokens * programs,),
            *made[0],
            *made[-1],
            *(tensor for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(tensor.stride(0) for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(indices.shape[0] for indices, _, _ in lists),
            *(width for _, _, width in lists),
            blocks[0],
            programs,
            COLUMNS=COLUMNS,
            num_warps=2,
            EARLY=early,
            **early_start(early),
        )
    return tuple(tensor for pair in made for tensor in pair)


def sparse_mla_decode_ragged_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    widths = [max_entries or indices.shape[0]]
    if extra_indices is not None:
        widths.append(extra_max_entries or extra_indices.shape[0])
    if q.shape[0] * max(widths) >= MAX_ROWS_NUMEL:
        return f"{q.shape[0]} rows of up to {max(widths)} entries: give max_entries, the most a row has"
    return sparse_mla_decode_refuses(
        q, k_cache, indices, indptr, block_size, cache_format, scale, attn_sink,
        extra_k_cache, None if extra_indices is None else indices, extra_indptr, extra_block_size, kv_scale,
    )  # fmt: skip


def sparse_mla_decode_ragged(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> tuple[Tensor, Tensor]:
    """See the reference. The bits are those of `sparse_mla_decode` for the padded rows."""
    second = None
    if extra_indices is not None and extra_indptr is not None:
        second = (extra_indices, extra_indptr, extra_max_entries or extra_indices.shape[0])
    rows: tuple[Any, ...] = dense_rows(q.shape[0], (indices, indptr, max_entries or indices.shape[0]), second)
    extra: tuple[Any, ...] = (None, None) if second is None else rows[2:]
    attend: tuple[Any, ...] = (block_size, cache_format, scale, attn_sink)
    attend += (extra_k_cache, *extra, extra_block_size, kv_scale)
    return sparse_mla_decode(q, k_cache, *rows[:2], *attend)
