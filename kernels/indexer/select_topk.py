"""Exact selection of the K largest order keys of a row, listed in ascending column order.

Of the boundary that topk_boundary.py finds, keys >= hi are taken, and of those in [lo, hi), which are equal by then,
the first ones that fit. Columns are written as they are, or as the cache slots that a block table has for them.

A thread holds runs of RUN columns: what comes before a column in its run needs no other thread, and a run of columns
lies in one block. A row of more keys than a tile is selected from in parts, a program each; who finds that it is the
last selects from what the parts have selected. That holds the K best of the row, ties included: the first of equal
keys of the row are the first of their part.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX, align_up, cdiv
from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters, arrive
from ..metadata.global_topk import NO_LEN, map_entries
from .histogram import counters, store
from .radix_select import ROW_ALIGN, bounds, load_tile, tile_columns, tile_runs
from .score_triton import INVISIBLE, visible_entries

PAD = tl.constexpr(PAD_INDEX)
RUN = 4
"""Columns of a run at most: as many keys as a thread reads at once."""
FOLLOWED_TOKENS = 8
"""Most tokens whose selection lets the next kernel start. Programs of that one share out the multiprocessors unevenly
among those that more programs of this one have left: the scores of 32 tokens behind it take 0.6 us longer."""


@triton.jit
def _rank(hits, THREADS: tl.constexpr):
    """For int32 `hits` `[ROWS, RUN]`, 0 or 1, how many come before each of them, and how many are in each run."""
    ROWS: tl.constexpr = hits.shape[0]
    of_run = tl.sum(hits, axis=1)
    runs = tl.reshape(of_run, (ROWS // THREADS, THREADS))
    of_thread = tl.sum(runs, axis=0)
    before = (tl.cumsum(of_thread, axis=0) - of_thread)[None, :] + tl.cumsum(runs, axis=0) - runs
    return tl.reshape(before, (ROWS,))[:, None] + tl.cumsum(hits, axis=1) - hits, of_run


@triton.jit
def _choose(key, lo, hi, room, equal, THREADS: tl.constexpr):
    """Which keys of a tile are taken: those >= hi, and of those in [lo, hi) the first `room` of the row.

    `equal` counts those in [lo, hi) before this tile, and is given as it is before the next one.
    """
    takes = key >= hi
    # Rare: without equal keys at the boundary all keys >= hi are K.
    if equal < room:
        is_equal = (key >= lo) & (key < hi)
        rank, of_run = _rank(is_equal.to(tl.int32), THREADS)
        takes |= is_equal & (equal + rank < room)
        equal += tl.sum(of_run)
    return takes, equal


@triton.jit
def _finish(p_selected, p_count, is_valid, taken, mapped, K: tl.constexpr, PADDED_K: tl.constexpr, PAGE: tl.constexpr):
    """Pad a row of which `taken` columns are written, and write how many of them have slots."""
    o_k = tl.arange(0, PADDED_K)
    tl.store(p_selected + o_k, PAD, mask=(o_k >= taken) & (o_k < K))
    if PAGE > 0:
        tl.store(p_count, tl.where(is_valid, mapped, NO_LEN))


@triton.jit
def _join(
    p_selected, p_best, p_best_columns, length, p_map, map_stride, map_columns,
    at, K: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    BINS: tl.constexpr, NATIVE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Select from the `length` best of the parts. Gives how many are taken, and how many of them have slots."""
    head = load_tile(p_best, 0, length, ROWS, THREADS, RUN)
    lo, hi, room = bounds(p_best, head, length, at, K, ROWS, THREADS, RUN, TILES, BINS, NATIVE, True)
    taken, equal, mapped = tl.zeros_like(lo), tl.zeros_like(lo), tl.zeros_like(lo)
    for start in range(0, length, ROWS * RUN):
        key = load_tile(p_best, start, length, ROWS, THREADS, RUN)
        takes, equal = _choose(key, lo, hi, room, equal, THREADS)
        place, of_run = _rank(takes.to(tl.int32), THREADS)
        p_from = p_best_columns + tile_columns(start, ROWS, THREADS, RUN)
        value = tl.load(p_from, mask=takes, other=0, cache_modifier=".cg")
        if PAGE > 0:
            value, live = map_entries(p_map, map_stride, map_columns, value, takes, PAGE)
            mapped += tl.sum(live.to(tl.int32))
        store(p_selected + taken + place, value, takes, NATIVE)
        taken += tl.sum(of_run)
    return taken, mapped


@triton.jit(
    do_not_specialize=["table_rows", "map_rows", "map_columns", "reach"],
    do_not_specialize_on_alignment=["p_arrived", "p_requests", "p_lens", "p_map", "p_is_valid"],
)
def select_topk_kernel(
    p_out,  # [T, K] int32, contiguous
    p_counts,  # [T] int32, contiguous; with PAGE only, as are the others of the map
    p_keys,  # [T, >= reach, a multiple of ROW_ALIGN] int32 order keys of the context
    p_best,  # [T, >= PARTS * K, a multiple of ROW_ALIGN] int32: keys; with PARTS > 1 only, as are the next two
    p_best_columns,  # the same: their columns
    p_arrived,  # [>= T] int32, zero
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    p_map,  # [map_rows, map_columns] int
    p_is_valid,  # [>= T] bool
    key_stride,
    best_stride,
    token_strides,  # of requests and lens
    map_strides,
    valid_stride,
    table_rows,
    map_rows,
    map_columns,
    reach,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    RUN: tl.constexpr,  # divides PAGE
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    NATIVE: tl.constexpr,
    PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched before the kernel that writes the keys ends
    FOLLOWED: tl.constexpr,  # lets the next kernel start early
):
    """Program (p, s) of (T, PARTS) selects from the s-th tile of token p.

    With PAGE, entries of a block of the map, slots are written in the place of columns, and how many there are.
    """
    TILE: tl.constexpr = ROWS * RUN
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # What is read in front of the wait is older than the kernel that it waits for, which lets this one start when it
    # has itself waited for those in front.
    request, length = visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach)
    parts, start = tl.maximum(tl.cdiv(length, TILE), 1), part * TILE
    if part < parts:
        # A request that is not known sees nothing.
        columns = tl.where(request < map_rows, map_columns, 0)
        p_map_row, map_stride = p_map + tl.where(request < map_rows, request, 0) * map_strides[0], map_strides[1]
        at = counters(BINS, NATIVE)
        # [ROWS]: a slot for the first column of each run.
        column = tile_runs(ROWS, THREADS, RUN)
        slot, live = column, column < length
        if PAGE > 0:
            slot, live = map_entries(p_map_row, map_stride, columns, column, live, PAGE)
        if NATIVE:
            # The counters are zero.
            tl.debug_barrier()
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        p_row, own, p_selected = (
            p_keys + token * key_stride + start,
            tl.minimum(length - start, TILE),
            p_out + token * K,
        )
        p_count, is_valid = p_counts + token, False
        if PAGE > 0:
            # In front of what is selected: behind what that is stored by, it would be waited for alone.
            is_valid = tl.load(p_is_valid + token * valid_stride)
        key = load_tile(p_row, 0, own, ROWS, THREADS, RUN)
        lo, hi, room = bounds(p_row, key, own, at, K, ROWS, THREADS, RUN, 1, BINS, NATIVE, False)
        takes, _ = _choose(key, lo, hi, room, tl.zeros_like(room), THREADS)
        place, of_run = _rank(takes.to(tl.int32), THREADS)
        # Those that have slots in the upper half of the word.
        both = tl.sum(tl.where(live, of_run * ((1 << 16) + 1), of_run))
        taken, mapped = both & ((1 << 16) - 1), both >> 16
        if PARTS == 1 or parts == 1:
            value = tile_columns(0, ROWS, THREADS, RUN)
            if PAGE > 0:
                value = tl.where(live[:, None], slot[:, None] + tl.arange(0, RUN)[None, :], PAD)
            store(p_selected + place, value, takes, NATIVE)
            _finish(p_selected, p_count, is_valid, taken, mapped, K, PADDED_K, PAGE)
        else:
            p_token_best, p_token_columns = p_best + token * best_stride, p_best_columns + token * best_stride
            store(p_token_best + part * K + place, key, takes, NATIVE)
            own_columns = tile_columns(start, ROWS, THREADS, RUN)
            store(p_token_columns + part * K + place, own_columns, takes, NATIVE)
            o_k = tl.arange(0, PADDED_K)
            tl.store(p_token_best + part * K + o_k, INVISIBLE, mask=(o_k >= taken) & (o_k < K))
            if arrive(p_arrived + token) == parts - 1:
                tl.store(p_arrived + token, 0)
                TILES: tl.constexpr = (PARTS * K + TILE - 1) // TILE
                all_taken, mapped = _join(
                    p_selected, p_token_best, p_token_columns, parts * K, p_map_row, map_stride, columns,
                    at, K, ROWS, THREADS, RUN, TILES, BINS, NATIVE, PAGE,
                )  # fmt: skip
                _finish(p_selected, p_count, is_valid, all_taken, mapped, K, PADDED_K, PAGE)


class SlotMap(NamedTuple):
    """Where entries go: what `global_topk` takes beside them, and its counts to write."""

    counts: Tensor
    block_table: Tensor
    is_valid_token: Tensor
    block_size: int


def select(
    out: Tensor,
    keys: Tensor,
    token_to_req: Tensor,
    lens: Tensor,
    table_rows: int,
    reach: int,
    tile: tuple[int, int],
    slots: SlotMap | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Write the best columns of each row of `keys`, or with `slots` theirs, to `out` `[T, K]`.

    `tile` is the number of keys of a program, and warps. `dependent`: it may start while the kernel that writes `keys`,
    which calls `gdc_launch_dependents`, still runs.
    """
    tokens, topk = out.shape
    native = gpu_of(out.device).backend == "cuda"
    # Every thread of a native kernel counts, and none counts what another one does.
    columns = max(min(tile[0], triton.next_power_of_2(keys.stride(0))), 32 * RUN if native else ROW_ALIGN)
    parts = cdiv(keys.stride(0), columns)
    # Without a map the kernel touches none of its arguments.
    counts, table, is_valid, page = slots or SlotMap(out, out, out[:, 0], 0)
    run = min(RUN, page & -page) if page else RUN
    # Nor what parts leave, if there is one.
    best, arrived = keys[None], keys
    if parts > 1:
        best = keys.new_empty((2, tokens, align_up(parts * topk, ROW_ALIGN)))
        arrived = arrival_counters(tokens, keys.device)
    warps = min(tile[1], max(1, columns // 256))
    threads = min(32 * warps, columns // run)
    launch_kernel(
        select_topk_kernel,
        (tokens, parts),
        out,
        counts,
        keys,
        best[0],
        best[-1],
        arrived,
        token_to_req,
        lens,
        table,
        is_valid,
        keys.stride(0),
        best.stride(1),
        (token_to_req.stride(0), lens.stride(0)),
        table.stride(),
        is_valid.stride(0),
        table_rows,
        table.shape[0],
        table.shape[1],
        reach,
        K=topk,
        PADDED_K=triton.next_power_of_2(topk),
        ROWS=columns // run,
        THREADS=threads,
        RUN=run,
        PARTS=parts,
        BINS=256 * warps if native else 256,
        NATIVE=native,
        PAGE=page,
        DEPENDENT=dependent,
        FOLLOWED=dependent and tokens <= FOLLOWED_TOKENS,
        num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )
