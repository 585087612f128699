"""`batch_metadata`: one launch writes every row of a step's metadata.

A program finds its token's request and position from the query starts; rows after the last token find none. With few
tokens the latency of three dependent loads dominates, with many the stores of the N * (W + C) index elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import CSA_RATIO, HCA_RATIO, PAD_INDEX, PAD_LEN, cdiv
from ...ops.metadata.batch_metadata import WRITTEN
from ...reference.metadata.batch_metadata import BatchMetadataArguments
from ...sources import groups_of
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
PLACES = groups_of((CSA_RATIO, HCA_RATIO))
"""Groups that the kernel has a place for."""
NUM_GROUPS = tl.constexpr(len(PLACES))
WINDOW = tl.constexpr(0)
C128 = tl.constexpr(next(place for place, group in enumerate(PLACES) if group.listed and group.ratio == HCA_RATIO))


class Buffers(NamedTuple):
    """Buffers that the kernel writes; those that a call lacks may be any tensor.

    Attributes:
        p_positions: `[N]` int64; p_requests: `[N]` int32; p_valid: `[N]` bool.
        p_slots: of each group `[N]` int64.
        p_window_indices: `[N, W]` int32; p_c128_indices: `[N, C]` int32; their lengths `[N]` int32.
        p_c4_context, p_c128_context: `[N]` int32.
    """

    p_positions: Tensor
    p_requests: Tensor
    p_valid: Tensor
    p_slots: tuple[Tensor, ...]
    p_window_indices: Tensor
    p_window_lens: Tensor
    p_c128_indices: Tensor
    p_c128_lens: Tensor
    p_c4_context: Tensor
    p_c128_context: Tensor


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        has: whether each group is there; the other flags likewise.
        pages, ratios: tokens or entries of a page, and tokens of an entry, of each group.
        window, entries: columns W and C of the index rows; window_block: W rounded up to a power of two.
        piece: columns of ratio 128 that a program writes. starts: query starts that it compares at a time.
    """

    has: tuple[bool, ...]
    has_engine: bool
    has_c4_context: bool
    has_c128_context: bool
    pages: tuple[int, ...]
    ratios: tuple[int, ...]
    window: int
    entries: int
    window_block: int
    piece: int
    starts: int


@triton.jit
def find_token(token, p_starts, p_lens, p_engine, strides, requests, engine_rows, HAS_ENGINE, STARTS):
    """Return request and position of a token; 0 and -1 for padding."""
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
    """Return int64 slots of logical tokens or entries of a request; -1 where there is none."""
    ok = (logical >= 0) & (request < sizes[0])
    index = tl.where(ok, logical, 0)
    column = index // BLOCK
    ok &= column < sizes[1]
    at = tl.where(ok, request, 0) * strides[0] + tl.where(ok, column, 0) * strides[1]
    block = tl.load(p_table + at, mask=ok, other=PAD).to(tl.int64)
    return tl.where(ok & (block >= 0), block * BLOCK + index % BLOCK, PAD)


@triton.jit(do_not_specialize=["requests", "engine_rows"])
def batch_metadata_kernel(
    buffers,
    inputs,  # query starts [requests + 1], lengths [requests] and the engine's slots [engine_rows], int
    p_tables,  # of each group: [R, B] int
    strides,  # of the inputs; of each table; and its sizes; of both index buffers
    requests,
    engine_rows,
    SHAPE: tl.constexpr,
):
    """Program (t, 0) writes all of token t but its entries of ratio 128; program (t, 1 + p) writes piece p of those."""
    p_positions, p_requests, p_valid, p_slots, p_window_indices, p_window_lens = buffers[:6]
    p_c128_indices, p_c128_lens, p_c4_context, p_c128_context = buffers[6:]
    p_starts, p_lens, p_engine = inputs
    strides, table_strides, table_sizes, row_strides = strides
    HAS: tl.constexpr = SHAPE.has
    PAGES: tl.constexpr = SHAPE.pages
    RATIOS: tl.constexpr = SHAPE.ratios
    W: tl.constexpr = SHAPE.window
    C: tl.constexpr = SHAPE.entries
    PIECE: tl.constexpr = SHAPE.piece
    token = tl.program_id(0).to(tl.int64)
    request, position = find_token(
        token, p_starts, p_lens, p_engine, strides, requests, engine_rows, SHAPE.has_engine, SHAPE.starts
    )
    seen = tl.where(position >= 0, (position + 1) // HCA, NO_LEN)
    if tl.program_id(1) == 0:
        tl.store(p_positions + token, tl.maximum(position, 0))
        tl.store(p_requests + token, request.to(tl.int32))
        tl.store(p_valid + token, position >= 0)
        if SHAPE.has_c4_context:
            tl.store(p_c4_context + token, tl.where(position >= 0, (position + 1) // CSA, NO_LEN).to(tl.int32))
        if SHAPE.has_c128_context:
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
            # [window_block]
            o_w = tl.arange(0, SHAPE.window_block)
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


def places_of(op: BatchMetadataArguments) -> list[int] | None:
    """Return the place in the kernel of each group of a call, None if there is none for one.

    Lists have places of their own. Of the other places, a group takes the one for its pages if it is free.
    """
    listed = {group: WINDOW.value if op.row_tokens[group] == 1 else C128.value for group in op.listed}
    free = [place for place in range(len(PLACES)) if place not in (WINDOW.value, C128.value)]
    places = []
    for group, (tokens, rows) in enumerate(zip(op.row_tokens, op.page_rows, strict=True)):
        if group not in listed:
            if not free:
                return None
            like = (place for place in free if (PLACES[place].row_tokens, PLACES[place].page_rows) == (tokens, rows))
            listed[group] = next(like, free[0])
            free.remove(listed[group])
        places.append(listed[group])
    return places if len({*places}) == len(places) else None


def why_unsupported_batch_metadata(op: BatchMetadataArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    ratios = {op.row_tokens[group] for group in op.listed} - {1}
    if ratios - {HCA_RATIO} or places_of(op) is None:
        lists = f"these are {len(op.listed)} lists, of {sorted(ratios)} tokens, of {len(op.row_tokens)} groups"
        return f"it lists a window and entries of {HCA_RATIO} tokens, of at most {len(PLACES)} groups, {lists}"
    if len({*op.ratios}) != len(op.ratios) or {*op.ratios} - {CSA_RATIO, HCA_RATIO}:
        return f"it counts entries of {CSA_RATIO} and {HCA_RATIO} tokens, these are {list(op.ratios)}"
    for name in WRITTEN:
        value = getattr(op, name)
        # A graph does not tell the buffers that it mutates.
        for number, buffer in enumerate([value] if isinstance(value, Tensor) else value or ()):
            if buffer.shape[0] and buffer.stride(-1) != 1 and buffer.shape[-1] > 1:
                where = name if isinstance(value, Tensor) else f"{name} {number}"
                return f"the last dim of {where} is contiguous, this one has stride {buffer.stride(-1)}"
    return ""


def batch_metadata(op: BatchMetadataArguments) -> None:
    """Launch `batch_metadata`; every byte of the buffers equals the reference."""
    positions, engine, starts, lens = op.positions, op.slot_mapping, op.query_start_loc, op.seq_lens
    rows, requests = positions.shape[0], lens.shape[0]
    if rows == 0:
        return
    places = places_of(op)
    assert places is not None
    tables, slots = dict(zip(places, op.block_tables, strict=True)), dict(zip(places, op.slots, strict=True))
    lists = {places[group]: pair for group, pair in zip(op.listed, zip(op.indices, op.lens, strict=True), strict=True)}
    window, entries = (lists.get(place, (positions, positions)) for place in (WINDOW.value, C128.value))
    visible = dict(zip(op.ratios, op.context_lens, strict=True))
    index_rows = [lists[place][0] if place in lists else None for place in (WINDOW.value, C128.value)]
    widths = [0 if indices is None else indices.shape[1] for indices in index_rows]
    piece = min(PIECE, triton.next_power_of_2(max(widths[1], 1)))
    # The kernel neither reads nor writes what a call lacks: any tensor stands for it.
    some = [tables.get(place, positions[:, None]) for place in range(len(PLACES))]
    pages = [(group.page_rows, group.row_tokens) for group in PLACES]
    for place, page_rows, row_tokens in zip(places, op.page_rows, op.row_tokens, strict=True):
        pages[place] = page_rows, row_tokens
    launch_kernel(
        batch_metadata_kernel,
        (rows, 1 + cdiv(widths[1], piece)),
        Buffers(
            positions,
            op.token_to_req,
            op.is_valid_token,
            tuple(slots.get(place, positions) for place in range(len(PLACES))),
            window[0],
            window[1],
            entries[0],
            entries[1],
            visible.get(CSA_RATIO, positions),
            visible.get(HCA_RATIO, positions),
        ),
        (starts, lens, positions if engine is None else engine),
        tuple(some),
        (
            (starts.stride(0), lens.stride(0), 0 if engine is None else engine.stride(0)),
            tuple(table.stride() for table in some),
            tuple(tuple(table.shape) for table in some),
            tuple(0 if indices is None else indices.stride(0) for indices in index_rows),
        ),
        requests,
        0 if engine is None else engine.shape[0],
        SHAPE=Shape(
            has=tuple(place in tables for place in range(len(PLACES))),
            has_engine=engine is not None,
            has_c4_context=CSA_RATIO in visible,
            has_c128_context=HCA_RATIO in visible,
            pages=tuple(page for page, _ in pages),
            ratios=tuple(tokens for _, tokens in pages),
            window=widths[0],
            entries=widths[1],
            window_block=triton.next_power_of_2(max(widths[0], 1)),
            piece=piece,
            starts=min(MAX_STARTS, triton.next_power_of_2(requests + 1)),
        ),
        num_warps=4,
    )
