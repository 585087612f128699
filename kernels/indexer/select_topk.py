"""Exact selection of the K largest order keys of a row, listed in ascending column order.

radix_select.py finds the boundary [lo, hi) of a row: keys >= hi are selected, and of those in [lo, hi), which are equal
by then, the first ones that fit. Columns are written, or the cache slots that a block table has for them.

A thread holds runs of RUN columns: the rank of a column within its run needs no other thread, and a run lies in one
block. A row of more keys than a tile is divided into parts, a program each; the last program to finish selects from
the selections of all parts. They include the K best of the row, ties included, because the first of equal keys of the
row are the first of their part.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX, align_up, cdiv
from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option
from ..host.semaphores import arrival_counters, arrive
from ..metadata.global_topk import NO_LEN, map_entries
from .histogram import reserve_counters, store_in_place
from .radix_select import ROW_ALIGN, Shape, bounds, load_tile, tile_columns, tile_runs
from .score_triton import INVISIBLE, visible_entries

PAD = tl.constexpr(PAD_INDEX)
RUN = 4
"""Most columns of a run: as many keys as a thread reads at once."""
MAX_FOLLOWED_TOKENS = 8
"""Most tokens for which the selection lets the next kernel start: with more, its programs spread unevenly over busy
SMs."""


@triton.jit
def rank(hits, THREADS: tl.constexpr):
    """Return, for int32 `hits` `[rows, run]` of 0 or 1, the number before each element, and that in each run."""
    ROWS: tl.constexpr = hits.shape[0]
    of_run = tl.sum(hits, axis=1)
    runs = tl.reshape(of_run, (ROWS // THREADS, THREADS))
    of_thread = tl.sum(runs, axis=0)
    before = (tl.cumsum(of_thread, axis=0) - of_thread)[None, :] + tl.cumsum(runs, axis=0) - runs
    return tl.reshape(before, (ROWS,))[:, None] + tl.cumsum(hits, axis=1) - hits, of_run


@triton.jit
def choose(key, boundary, equal, THREADS: tl.constexpr):
    """Select those keys of a tile that are >= hi, and of those in [lo, hi) the first `room` of the row.

    `equal` counts those in [lo, hi) before this tile. Returns a mask, and that count before the next tile.
    """
    lo, hi, room = boundary
    chosen = key >= hi
    # Rare: without equal keys at the boundary all keys >= hi are K.
    if equal < room:
        is_equal = (key >= lo) & (key < hi)
        before, of_run = rank(is_equal.to(tl.int32), THREADS)
        chosen |= is_equal & (equal + before < room)
        equal += tl.sum(of_run)
    return chosen, equal


@triton.jit
def pad_row(p_selected, p_count, is_valid, number, mapped, SHAPE: tl.constexpr):
    """Pad a row after its first `number` columns, and write how many of these have slots."""
    o_k = tl.arange(0, SHAPE.padded_k)
    tl.store(p_selected + o_k, PAD, mask=(o_k >= number) & (o_k < SHAPE.k))
    if SHAPE.page > 0:
        tl.store(p_count, tl.where(is_valid, mapped, NO_LEN))


@triton.jit
def _select_from_parts(p_selected, best, length, slot_row, at, SHAPE: tl.constexpr):
    """Select from the `length` best keys of the parts. Return how many are selected, and how many have slots."""
    p_best, p_best_columns = best
    p_map, map_stride, map_columns = slot_row
    THREADS: tl.constexpr = SHAPE.threads
    TILE: tl.constexpr = SHAPE.rows * SHAPE.run
    TILES: tl.constexpr = (SHAPE.parts * SHAPE.k + TILE - 1) // TILE
    head = load_tile(p_best, 0, length, SHAPE)
    boundary = bounds(p_best, head, length, at, TILES, True, SHAPE)
    number, equal, mapped = tl.zeros_like(boundary[0]), tl.zeros_like(boundary[0]), tl.zeros_like(boundary[0])
    for start in range(0, length, TILE):
        key = load_tile(p_best, start, length, SHAPE)
        chosen, equal = choose(key, boundary, equal, THREADS)
        place, of_run = rank(chosen.to(tl.int32), THREADS)
        p_from = p_best_columns + tile_columns(start, SHAPE)
        value = tl.load(p_from, mask=chosen, other=0, cache_modifier=".cg")
        if SHAPE.page > 0:
            value, live = map_entries(p_map, map_stride, map_columns, value, chosen, SHAPE.page)
            mapped += tl.sum(live.to(tl.int32))
        store_in_place(p_selected + number + place, value, chosen, SHAPE.native)
        number += tl.sum(of_run)
    return number, mapped


@triton.jit(
    do_not_specialize=["table_rows", "map_rows", "map_columns", "reach"],
    do_not_specialize_on_alignment=["p_arrived", "p_requests", "p_lens", "p_map", "p_is_valid"],
)
def select_topk_kernel(
    outputs,  # selected [T, K], and with SHAPE.page counts [T]; int32, contiguous
    p_keys,  # [T, >= reach, a multiple of ROW_ALIGN] int32 order keys of the context
    best,  # keys and columns that parts select, int32 [T, >= parts * K, a multiple of ROW_ALIGN]; with parts > 1
    p_arrived,  # [>= T] int32, zero; with parts > 1
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    p_map,  # [map_rows, map_columns] int; with SHAPE.page, as p_is_valid
    p_is_valid,  # [>= T] bool
    strides,
    table_rows,
    map_rows,
    map_columns,
    reach,
    SHAPE: tl.constexpr,
):
    """Select from the s-th tile of token p in program (p, s) of (T, parts).

    With SHAPE.page, slots are written in place of columns, and how many there are.
    """
    p_out, p_counts = outputs
    p_best, p_best_columns = best
    K: tl.constexpr = SHAPE.k
    RUN: tl.constexpr = SHAPE.run
    PAGE: tl.constexpr = SHAPE.page
    NATIVE: tl.constexpr = SHAPE.native
    THREADS: tl.constexpr = SHAPE.threads
    TILE: tl.constexpr = SHAPE.rows * RUN
    if SHAPE.followed:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # What is read before the wait was written before the kernel that writes the keys, which lets this one start only
    # after it has itself waited for previous kernels.
    request, length = visible_entries(p_requests, p_lens, token, strides.tokens, table_rows, reach)
    parts, start = tl.maximum(tl.cdiv(length, TILE), 1), part * TILE
    if part < parts:
        # An unknown request sees nothing.
        columns = tl.where(request < map_rows, map_columns, 0)
        p_map_row = p_map + tl.where(request < map_rows, request, 0) * strides.map[0]
        at = reserve_counters(SHAPE.bins, NATIVE)
        # [rows]: a slot for the first column of each run.
        column = tile_runs(SHAPE)
        slot, live = column, column < length
        if PAGE > 0:
            slot, live = map_entries(p_map_row, strides.map[1], columns, column, live, PAGE)
        if NATIVE:
            # After it the counters are zero.
            tl.debug_barrier()
        if SHAPE.dependent:
            tl.extra.cuda.gdc_wait()
        p_row, own = p_keys + token * strides.keys + start, tl.minimum(length - start, TILE)
        p_selected, p_count, is_valid = p_out + token * K, p_counts + token, False
        if PAGE > 0:
            # Loaded early, so that it overlaps the loads of the keys.
            is_valid = tl.load(p_is_valid + token * strides.valid)
        key = load_tile(p_row, 0, own, SHAPE)
        boundary = bounds(p_row, key, own, at, 1, False, SHAPE)
        chosen, _ = choose(key, boundary, tl.zeros_like(boundary[2]), THREADS)
        place, of_run = rank(chosen.to(tl.int32), THREADS)
        # One sum of two numbers: those that have slots in the upper half of the word.
        both = tl.sum(tl.where(live, of_run * ((1 << 16) + 1), of_run))
        number, mapped = both & ((1 << 16) - 1), both >> 16
        if SHAPE.parts == 1 or parts == 1:
            value = tile_columns(0, SHAPE)
            if PAGE > 0:
                value = tl.where(live[:, None], slot[:, None] + tl.arange(0, RUN)[None, :], PAD)
            store_in_place(p_selected + place, value, chosen, NATIVE)
            pad_row(p_selected, p_count, is_valid, number, mapped, SHAPE)
        else:
            p_token_best, p_token_columns = p_best + token * strides.best, p_best_columns + token * strides.best
            store_in_place(p_token_best + part * K + place, key, chosen, NATIVE)
            own_columns = tile_columns(start, SHAPE)
            store_in_place(p_token_columns + part * K + place, own_columns, chosen, NATIVE)
            o_k = tl.arange(0, SHAPE.padded_k)
            tl.store(p_token_best + part * K + o_k, INVISIBLE, mask=(o_k >= number) & (o_k < K))
            if arrive(p_arrived + token) == parts - 1:
                tl.store(p_arrived + token, 0)
                slot_row = p_map_row, strides.map[1], columns
                all_chosen, mapped = _select_from_parts(
                    p_selected, (p_token_best, p_token_columns), parts * K, slot_row, at, SHAPE
                )
                pad_row(p_selected, p_count, is_valid, all_chosen, mapped, SHAPE)


class Strides(NamedTuple):
    """Strides of the kernel's arguments; `tokens` are those of requests and lengths, `map` those of the block table."""

    keys: int
    best: int
    tokens: tuple[int, int]
    map: tuple[int, ...]
    valid: int


class KeyRows(NamedTuple):
    """Order keys to select from.

    Attributes:
        keys: int32 `[>= T, >= reach]`, columns padded to a multiple of ROW_ALIGN.
        token_to_req, lens: int `[>= T]`; a request outside [0, requests) sees nothing.
        reach: most entries of a request.
    """

    keys: Tensor
    token_to_req: Tensor
    lens: Tensor
    requests: int
    reach: int


class SlotMap(NamedTuple):
    """Map from selected entries to slots: the other arguments of `global_topk`, and its counts."""

    counts: Tensor
    block_table: Tensor
    is_valid_token: Tensor
    block_size: int


def select(
    out: Tensor, rows: KeyRows, tile: tuple[int, int], slots: SlotMap | None = None, *, dependent: bool = False
) -> None:
    """Write the best columns of each row of keys, or with `slots` theirs, to `out` `[T, K]`.

    Args:
        tile: number of keys of a program, and warps.
        dependent: whether the launch may start while the kernel that writes the keys, which calls
            `gdc_launch_dependents`, still runs.
    """
    tokens, topk = out.shape
    keys = rows.keys
    native = gpu_of(out.device).backend == "cuda"
    # Every thread of a native kernel counts, and no two count the same key.
    columns = max(min(tile[0], triton.next_power_of_2(keys.stride(0))), 32 * RUN if native else ROW_ALIGN)
    parts = cdiv(keys.stride(0), columns)
    # Any tensors stand for arguments that the kernel does not touch: those of the map, and of parts.
    counts, table, is_valid, page = slots or SlotMap(out, out, out[:, 0], 0)
    run = min(RUN, page & -page) if page else RUN
    best, arrived = keys[None], keys
    if parts > 1:
        best = keys.new_empty((2, tokens, align_up(parts * topk, ROW_ALIGN)))
        arrived = arrival_counters(tokens, keys.device)
    warps = min(tile[1], max(1, columns // 256))
    launch_kernel(
        select_topk_kernel,
        (tokens, parts),
        (out, counts),
        keys,
        (best[0], best[-1]),
        arrived,
        rows.token_to_req,
        rows.lens,
        table,
        is_valid,
        Strides(
            keys.stride(0), best.stride(1), (rows.token_to_req.stride(0), rows.lens.stride(0)),
            table.stride(), is_valid.stride(0),
        ),
        rows.requests,
        *table.shape,
        rows.reach,
        SHAPE=Shape(
            k=topk,
            padded_k=triton.next_power_of_2(topk),
            rows=columns // run,
            threads=min(32 * warps, columns // run),
            run=run,
            parts=parts,
            bins=256 * warps if native else 256,
            native=native,
            page=page,
            dependent=dependent,
            followed=dependent and tokens <= MAX_FOLLOWED_TOKENS,
        ),
        num_warps=warps,
        **pdl_option(dependent),
    )  # fmt: skip
