"""`global_topk` and `global_topk_ragged`: a program per token maps its chosen entries to slots and counts them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX, PAD_LEN
from ..host.launch import launch_kernel
from .ragged_from_dense import pack

MAX_COLUMNS = 1024
"""Columns that a program maps at a time."""
PAD = tl.constexpr(PAD_INDEX)
NO_LEN = tl.constexpr(PAD_LEN)
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)


class Shape(NamedTuple):
    """Compile-time sizes of a launch: entries of a page, K, and columns mapped at a time."""

    block_size: int
    k: int
    columns: int


@triton.jit
def map_entries(p_row, column_stride, columns, entry, live, BLOCK_SIZE: tl.constexpr):
    """Return int32 slots of a request's entries, -1 where there is none, and a mask of those there are.

    The `live` entries are mapped, by a block table row at `p_row` of which `columns` may be read.
    """
    live &= entry >= 0
    entry = tl.where(live, entry, 0)
    column = (entry // BLOCK_SIZE).to(tl.int64)
    live &= column < columns
    block = tl.load(p_row + tl.where(live, column, 0) * column_stride, mask=live, other=-1).to(tl.int64)
    slot = block * BLOCK_SIZE + entry % BLOCK_SIZE
    live &= (block >= 0) & (slot <= LAST_INDEX)
    return tl.where(live, slot, PAD).to(tl.int32), live


@triton.jit(
    do_not_specialize=["table_rows", "table_columns"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_is_valid"],
)
def global_topk_kernel(
    outputs,  # slots [T, K] and lens [T], int32, contiguous
    p_indices,  # [T, K] int
    p_requests,  # [>= T] int
    p_table,  # [table_rows, table_columns] int
    p_is_valid,  # [>= T] bool
    strides,  # of indices, requests, table and is_valid
    table_rows,
    table_columns,
    SHAPE: tl.constexpr,
):
    """Map the row of token p in program p."""
    p_out, p_lens = outputs
    index_strides, request_stride, table_strides, valid_stride = strides
    K: tl.constexpr = SHAPE.k
    COLUMNS: tl.constexpr = SHAPE.columns
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(p_requests + token * request_stride).to(tl.int64)
    # Loaded early, so that it overlaps the loads of the slots.
    is_valid = tl.load(p_is_valid + token * valid_stride)
    known = (request >= 0) & (request < table_rows)
    p_row = p_table + tl.where(known, request, 0) * table_strides[0]
    reach = tl.where(known, table_columns, 0)
    # [COLUMNS]
    count = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, K, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        index = tl.load(
            p_indices + token * index_strides[0] + o_k.to(tl.int64) * index_strides[1], mask=o_k < K, other=PAD
        )
        slot, live = map_entries(p_row, table_strides[1], reach, index, o_k < K, SHAPE.block_size)
        count += live.to(tl.int32)
        tl.store(p_out + token * K + o_k, slot, mask=o_k < K)
    tl.store(p_lens + token, tl.where(is_valid, tl.sum(count, axis=0), NO_LEN))


def global_topk(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Launch `global_topk`; the results equal the reference."""
    tokens, width = topk_indices.shape[0], topk_indices.shape[-1]
    slots = topk_indices.new_empty((tokens, width), dtype=torch.int32)
    lens = topk_indices.new_empty((tokens,), dtype=torch.int32)
    if tokens == 0:
        return slots, lens
    columns = min(MAX_COLUMNS, triton.next_power_of_2(max(width, 1)))
    launch_kernel(
        global_topk_kernel,
        (tokens,),
        (slots, lens),
        topk_indices,
        token_to_req,
        block_table,
        is_valid_token,
        (
            (topk_indices.stride(0), topk_indices.stride(-1)),
            token_to_req.stride(0),
            block_table.stride(),
            is_valid_token.stride(0),
        ),
        block_table.shape[0],
        block_table.shape[1],
        SHAPE=Shape(block_size, width, columns),
        num_warps=min(4, max(1, columns // 128)),
    )
    return slots, lens


def global_topk_ragged(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `global_topk_ragged`; the results equal the reference."""
    slots, lens = global_topk(topk_indices, token_to_req, block_table, is_valid_token, block_size)
    return *pack(slots, lens, None), lens
