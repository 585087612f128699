"""`batch_metadata`: one launch writes every row of a step's metadata.

reference/batch_metadata.py defines it; every bit is equal. Nothing depends on the number of tokens or of requests: a
program finds its own place in the batch, and rows behind the last token find none. At 128 tokens a launch is three
loads behind one another, about 3 us on an H200; with many tokens it is its stores, 4 bytes for each of the
N * (W + C) elements of the index rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import CSA_RATIO, HCA_RATIO, PAD_INDEX, PAD_LEN, cdiv, state_block_size, storage_block_size
from ...ops.metadata.batch_metadata import ARGUMENTS, CONTEXT_LENS, GROUPS, TOKENS
from ..host.launch import launch_kernel

MAX_STARTS = 1024
"""Query starts that a program compares at a time."""
PIECE = 1024
"""Columns of ratio 128 that a program writes."""
PAD = tl.constexpr(PAD_INDEX)
NO_LEN = tl.constexpr(PAD_LEN)
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)
NO_START = tl.constexpr(torch.iinfo(torch.int64).max)
CSA = tl.constexpr(CSA_RATIO)
HCA = tl.constexpr(HCA_RATIO)
NUM_GROUPS = tl.constexpr(len(GROUPS))
WINDOW = tl.constexpr(list(GROUPS).index("window"))
C128 = tl.constexpr(list(GROUPS).index("c128"))

GROUP_RATIOS = {"c4": CSA_RATIO, "indexer": CSA_RATIO, "c128": HCA_RATIO}
"""Groups whose slots are those of compressed entries; the others have a slot for each token."""
GROUP_PAGES = {
    "c4": storage_block_size(CSA_RATIO),
    "c4_state": state_block_size(CSA_RATIO),
    "indexer": storage_block_size(CSA_RATIO),
    "indexer_state": state_block_size(CSA_RATIO),
    "c128": storage_block_size(HCA_RATIO),
    "c128_state": state_block_size(HCA_RATIO),
}


@triton.jit
def find_token(token, p_starts, p_lens, p_engine, strides, requests, engine_rows, HAS_ENGINE, STARTS):
    """Request and position of a token; 0 and -1 for padding."""
    # [STARTS]
    before = tl.zeros((STARTS,), tl.int32)
    for first in range(0, requests + 1, STARTS):
        o_r = first + tl.arange(0, STARTS)
        start = tl.load(p_starts + o_r.to(tl.int64) * strides[0], mask=o_r <= requests, other=NO_START).to(tl.int64)
        before += ((o_r <= requests) & (start <= token)).to(tl.int32)
    request = tl.sum(before, axis=0).to(tl.int64) - 1
    known = (request >= 0) & (request < requests)
    row = tl.where(known, request, 0)
    end = tl.load(p_starts + (row + 1) * strides[0], mask=known, other=0).to(tl.int64)
    length = tl.load(p_lens + row * strides[1], mask=known, other=0).to(tl.int64)
    position = token - end + length
    valid = known & (token < end) & (position >= 0)
    if HAS_ENGINE:
        valid &= tl.load(p_engine + token * strides[2], mask=token < engine_rows, other=PAD) >= 0
    return tl.where(valid, request, 0), tl.where(valid, position, PAD)


@triton.jit
def find_slots(logical, request, p_table, strides, sizes, BLOCK: tl.constexpr):
    """int64 slots of logical tokens or entries of a request; -1 where there is none."""
    ok = (logical >= 0) & (request < sizes[0])
    index = tl.where(ok, logical, 0)
    column = index // BLOCK
    ok &= column < sizes[1]
    at = tl.where(ok, request, 0) * strides[0] + tl.where(ok, column, 0) * strides[1]
    block = tl.load(p_table + at, mask=ok, other=PAD).to(tl.int64)
    return tl.where(ok & (block >= 0), block * BLOCK + index % BLOCK, PAD)


@triton.jit(do_not_specialize=["requests", "engine_rows"])
def batch_metadata_kernel(
    p_positions,  # [N] int64
    p_requests,  # [N] int32
    p_valid,  # [N] bool
    p_slots,  # of each group: [N] int64
    p_window_indices,  # [N, W] int32
    p_window_lens,  # [N] int32
    p_c128_indices,  # [N, C] int32
    p_c128_lens,  # [N] int32
    p_c4_context,  # [N] int32
    p_c128_context,  # [N] int32
    p_starts,  # [requests + 1] int
    p_lens,  # [requests] int
    p_engine,  # [engine_rows] int
    p_tables,  # of each group: [R, B] int
    strides,  # of starts, lens and the engine's slots
    table_strides,
    table_sizes,
    row_strides,  # of both index buffers
    requests,
    engine_rows,
    HAS: tl.constexpr,  # whether each group is there
    HAS_ENGINE: tl.constexpr,
    HAS_C4_CONTEXT: tl.constexpr,
    HAS_C128_CONTEXT: tl.constexpr,
    PAGES: tl.constexpr,  # page size of each group
    RATIOS: tl.constexpr,  # tokens of an entry of each group
    W: tl.constexpr,
    C: tl.constexpr,
    W_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Program (t, 0) writes all of token t but its entries of ratio 128; program (t, 1 + p) writes piece p of those."""
    token = tl.program_id(0).to(tl.int64)
    request, position = find_token(
        token, p_starts, p_lens, p_engine, strides, requests, engine_rows, HAS_ENGINE, STARTS
    )
    seen = tl.where(position >= 0, (position + 1) // HCA, NO_LEN)
    if tl.program_id(1) == 0:
        tl.store(p_positions + token, tl.maximum(position, 0))
        tl.store(p_requests + token, request.to(tl.int32))
        tl.store(p_valid + token, position >= 0)
        if HAS_C4_CONTEXT:
            tl.store(p_c4_context + token, tl.where(position >= 0, (position + 1) // CSA, NO_LEN).to(tl.int32))
        if HAS_C128_CONTEXT:
            tl.store(p_c128_context + token, seen.to(tl.int32))
        for g in tl.static_range(NUM_GROUPS):
            if HAS[g]:
                closes = (position >= 0) & ((position + 1) % RATIOS[g] == 0)
                own = tl.where(closes, position // RATIOS[g], PAD)
                own = find_slots(own, request, p_tables[g], table_strides[g], table_sizes[g], PAGES[g])
                tl.store(p_slots[g] + token, own)
        if HAS[C128]:
            tl.store(p_c128_lens + token, tl.minimum(seen, C).to(tl.int32))
        if HAS[WINDOW]:
            count = tl.minimum(position + 1, W)
            tl.store(p_window_lens + token, count.to(tl.int32))
            # [W_BLOCK]
            o_w = tl.arange(0, W_BLOCK)
            tokens = tl.where(o_w < count, position - count + 1 + o_w, PAD)
            tokens = find_slots(
                tokens, request, p_tables[WINDOW], table_strides[WINDOW], table_sizes[WINDOW], PAGES[WINDOW]
            )
            tokens = tl.where(tokens <= LAST_INDEX, tokens, PAD).to(tl.int32)
            tl.store(p_window_indices + token * row_strides[0] + o_w, tokens, mask=o_w < W)
    elif HAS[C128]:
        # [PIECE]
        o_c = (tl.program_id(1) - 1) * PIECE + tl.arange(0, PIECE)
        entries = tl.where(o_c < seen, o_c, PAD).to(tl.int64)
        entries = find_slots(entries, request, p_tables[C128], table_strides[C128], table_sizes[C128], PAGES[C128])
        entries = tl.where(entries <= LAST_INDEX, entries, PAD).to(tl.int32)
        tl.store(p_c128_indices + token * row_strides[1] + o_c, entries, mask=o_c < C)


def batch_metadata_refuses(*args: Any, **kwargs: Any) -> str:
    """Why the kernel cannot take this call; "" if it can."""
    given = _named(args, kwargs)
    for name in (*TOKENS, *(name for buffers in GROUPS.values() for name in buffers), *CONTEXT_LENS):
        buffer = given.get(name)
        if buffer is not None and buffer.shape[0] and buffer.stride(-1) != 1 and buffer.shape[-1] > 1:
            return f"{name} has gaps between its elements"
    return ""


def batch_metadata(*args: Any, **kwargs: Any) -> None:
    """See the reference; every byte of the buffers is equal."""
    given = _named(args, kwargs)
    positions, tables = given["positions"], [given[f"{group}_block_table"] for group in GROUPS]
    rows, requests = positions.shape[0], given["seq_lens"].shape[0]
    if rows == 0:
        return
    has = tuple(table is not None for table in tables)
    window, c128 = given.get("window_indices"), given.get("c128_indices")
    engine = given["slot_mapping"]
    widths = [0 if indices is None else indices.shape[1] for indices in (window, c128)]
    piece = min(PIECE, triton.next_power_of_2(max(widths[1], 1)))

    def present(name: str, spare: Tensor = positions) -> Tensor:
        value = given.get(name)
        return spare if value is None else value

    some = [positions[:, None] if table is None else table for table in tables]
    launch_kernel(
        batch_metadata_kernel,
        (rows, 1 + cdiv(widths[1], piece)),
        positions,
        given["token_to_req"],
        given["is_valid_token"],
        tuple(present(f"{group}_slots") for group in GROUPS),
        present("window_indices"),
        present("window_lens"),
        present("c128_indices"),
        present("c128_lens"),
        present("c4_context_lens"),
        present("c128_context_lens"),
        given["query_start_loc"],
        given["seq_lens"],
        present("slot_mapping"),
        tuple(some),
        (given["query_start_loc"].stride(0), given["seq_lens"].stride(0), 0 if engine is None else engine.stride(0)),
        tuple(table.stride() for table in some),
        tuple(tuple(table.shape) for table in some),
        tuple(0 if indices is None else indices.stride(0) for indices in (window, c128)),
        requests,
        0 if engine is None else engine.shape[0],
        HAS=has,
        HAS_ENGINE=engine is not None,
        HAS_C4_CONTEXT=given.get("c4_context_lens") is not None,
        HAS_C128_CONTEXT=given.get("c128_context_lens") is not None,
        PAGES=tuple(GROUP_PAGES.get(group, given["window_block_size"]) for group in GROUPS),
        RATIOS=tuple(GROUP_RATIOS.get(group, 1) for group in GROUPS),
        W=widths[0],
        C=widths[1],
        W_BLOCK=triton.next_power_of_2(max(widths[0], 1)),
        PIECE=piece,
        STARTS=min(MAX_STARTS, triton.next_power_of_2(requests + 1)),
        num_warps=4,
    )


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, args, strict=False)) | kwargs
