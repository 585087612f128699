"""Exact selection of the K largest order keys of a long row, by way of the largest keys of its groups.

The scoring kernel writes the largest key of every GROUP neighbouring columns. The K best groups, of equal ones the
first, hold the K best keys, ties included: a key of any other group is worse than the largest of each of the K. So one
program a token selects K groups, then K of their K * GROUP keys, both as radix_select.py does with a row that stays in
registers. A row is not divided among programs: of 262,144 keys, one reads 16,384 of groups and 8,192 of the row.

A context of up to K groups is read whole, and the keys of its groups are not.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAD_INDEX, cdiv
from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option
from ..host.semaphores import settle
from ..metadata.global_topk import map_entries
from .histogram import reserve_counters, store_in_place
from .radix_select import ROW_ALIGN, VECTOR, Shape, bounds, tile_columns, tile_runs
from .score_triton import INVISIBLE, visible_entries
from .select_topk import MAX_FOLLOWED_TOKENS, RUN, KeyRows, SlotMap, choose, pad_row, rank

PAD = tl.constexpr(PAD_INDEX)
MAX_TILE = 16384
"""Most keys of a tile: 32 for each thread of 16 warps."""


@triton.jit
def _load_groups(p_best, start, groups, SHAPE: tl.constexpr):
    """Load int32 `[rows, run]` keys of groups from `start` on, INVISIBLE past the last.

    The L1 cache serves the second half of each sector. It holds nothing older, because the kernel before wrote them.
    """
    group = tile_columns(start, SHAPE)
    key = tl.load(p_best + group, mask=group < tl.cdiv(groups, VECTOR) * VECTOR, other=INVISIBLE)
    return tl.where(group < groups, key, INVISIBLE)


@triton.jit
def _list_groups(p_list, p_best, groups, at, SHAPE: tl.constexpr):
    """List the best of `groups` in ascending order. Return their number, and a key that none of their largest is below.

    The list is written to `p_list`, for all threads of the program to read.
    """
    THREADS: tl.constexpr = SHAPE.threads
    TILE: tl.constexpr = SHAPE.rows * SHAPE.run
    head = _load_groups(p_best, 0, groups, SHAPE)
    boundary = bounds(p_best, head, groups, at, SHAPE.parts, False, SHAPE)
    chosen, equal = choose(head, boundary, tl.zeros_like(boundary[2]), THREADS)
    place, of_run = rank(chosen.to(tl.int32), THREADS)
    store_in_place(p_list + place, tile_columns(0, SHAPE), chosen, SHAPE.native)
    number = tl.sum(of_run)
    if SHAPE.parts > 1:
        for start in range(TILE, groups, TILE):
            key = _load_groups(p_best, start, groups, SHAPE)
            chosen, equal = choose(key, boundary, equal, THREADS)
            place, of_run = rank(chosen.to(tl.int32), THREADS)
            store_in_place(p_list + number + place, tile_columns(start, SHAPE), chosen, SHAPE.native)
            number += tl.sum(of_run)
    settle()
    return number, boundary[0]


@triton.jit(
    do_not_specialize=["table_rows", "map_rows", "map_columns", "reach"],
    do_not_specialize_on_alignment=["p_requests", "p_lens", "p_map", "p_is_valid"],
)
def select_groups_kernel(
    outputs,  # selected [T, K], and with SHAPE.page counts [T]; int32, contiguous
    p_keys,  # [T, >= reach, a multiple of GROUP * ROW_ALIGN] int32 order keys of the context
    p_best,  # [T, columns of p_keys / GROUP] int32, the largest of each group; contiguous
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    p_map,  # [map_rows, map_columns] int; with SHAPE.page, as p_is_valid
    p_is_valid,  # [>= T] bool
    strides,
    table_rows,
    map_rows,
    map_columns,
    reach,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Select K of GROUPS, a Shape of groups, then K of their keys, of SHAPE, in program p for token p.

    With SHAPE.page, slots are written in place of columns, and how many there are.
    """
    p_out, p_counts = outputs
    K: tl.constexpr = SHAPE.k
    RUN: tl.constexpr = SHAPE.run
    PAGE: tl.constexpr = SHAPE.page
    THREADS: tl.constexpr = SHAPE.threads
    if SHAPE.followed:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    # What is read before the wait was written before the kernel that writes the keys; see select_topk.py.
    request, length = visible_entries(p_requests, p_lens, token, strides.tokens, table_rows, reach)
    columns = tl.where(request < map_rows, map_columns, 0)
    p_map_row = p_map + tl.where(request < map_rows, request, 0) * strides.map[0]
    p_count, is_valid = p_counts + token, False
    if PAGE > 0:
        is_valid = tl.load(p_is_valid + token * strides.valid)
    at = reserve_counters(SHAPE.bins, SHAPE.native)
    if SHAPE.native:
        # After it the counters are zero.
        tl.debug_barrier()
    if SHAPE.dependent:
        tl.extra.cuda.gdc_wait()
    p_row, p_selected = p_keys + token * strides.keys, p_out + token * K
    groups = tl.cdiv(length, GROUP)
    number, least, listed = groups, tl.full((), INVISIBLE, tl.int32), groups > K
    if listed:
        # The row of the result holds the list meanwhile.
        number, least = _list_groups(p_selected, p_best + token * strides.best, groups, at, GROUPS)
    # [rows]: the first column of each run.
    run = tile_runs(SHAPE)
    member = run // GROUP
    live = member < number
    group = tl.load(p_selected + member, mask=live & listed, other=0, cache_modifier=".cg")
    column = tl.where(listed, group, member) * GROUP + run % GROUP
    live &= column < length
    column = tl.where(live, column, 0)
    # [rows, RUN]: whole runs are read, because rows are padded.
    own = column[:, None] + tl.arange(0, RUN)[None, :]
    key = tl.load(p_row + own, mask=live[:, None], other=INVISIBLE)
    slot, mapped_run = column, live
    if PAGE > 0:
        slot, mapped_run = map_entries(p_map_row, strides.map[1], columns, column, live, PAGE)
    # At least K keys, if so many are visible, are not below `least`.
    key = tl.where(live[:, None] & (own < length) & (key >= least), key, INVISIBLE)
    boundary = bounds(p_row, key, number * GROUP, at, 1, True, SHAPE)
    chosen, _ = choose(key, boundary, tl.zeros_like(boundary[2]), THREADS)
    place, of_run = rank(chosen.to(tl.int32), THREADS)
    # One sum of two numbers: those that have slots in the upper half of the word.
    both = tl.sum(tl.where(mapped_run, of_run * ((1 << 16) + 1), of_run))
    selected, mapped = both & ((1 << 16) - 1), both >> 16
    value = own
    if PAGE > 0:
        value = tl.where(mapped_run[:, None], slot[:, None] + tl.arange(0, RUN)[None, :], PAD)
    store_in_place(p_selected + place, value, chosen, SHAPE.native)
    pad_row(p_selected, p_count, is_valid, selected, mapped, SHAPE)


class Strides(NamedTuple):
    """Strides of the kernel's arguments; `tokens` are those of requests and lengths, `map` those of the block table."""

    keys: int
    best: int
    tokens: tuple[int, int]
    map: tuple[int, ...]
    valid: int


def fits(topk: int, group: int) -> bool:
    """Return whether the keys of `topk` groups are one tile."""
    return topk * group <= MAX_TILE


def select_from_groups(
    out: Tensor,
    rows: KeyRows,
    best: Tensor,
    warps: int,
    slots: SlotMap | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Write the best columns of each row of keys, or with `slots` theirs, to `out` `[T, K]`.

    Args:
        best: int32 `[>= T, columns of keys / group]`, contiguous: the largest key of each group. Keys have a multiple
            of group * ROW_ALIGN columns, and K groups `fits`.
        dependent: whether the launch may start while the kernel that writes the keys, which calls
            `gdc_launch_dependents`, still runs.
    """
    tokens, topk = out.shape
    if tokens == 0:
        return
    group = rows.keys.stride(0) // best.stride(0)
    native = gpu_of(out.device).backend == "cuda"
    counts, table, is_valid, page = slots or SlotMap(out, out, out[:, 0], 0)
    run = min(RUN, page & -page, group) if page else RUN
    keys = triton.next_power_of_2(topk * group)
    # Every thread of a native kernel counts, and no two count the same key.
    warps = max(1, min(warps, keys // (32 * RUN)))
    least = 32 * RUN * warps if native else ROW_ALIGN
    keys, tile = max(least, keys), max(least, min(MAX_TILE, triton.next_power_of_2(best.stride(0))))
    shape = Shape(
        k=topk,
        padded_k=triton.next_power_of_2(topk),
        rows=keys // run,
        threads=min(32 * warps, keys // run),
        run=run,
        parts=1,
        bins=256 * warps if native else 256,
        native=native,
        page=page,
        dependent=dependent,
        followed=dependent and tokens <= MAX_FOLLOWED_TOKENS,
        all_counted=True,
    )
    launch_kernel(
        select_groups_kernel,
        (tokens,),
        (out, counts),
        rows.keys,
        best,
        rows.token_to_req,
        rows.lens,
        table,
        is_valid,
        Strides(
            rows.keys.stride(0), best.stride(0), (rows.token_to_req.stride(0), rows.lens.stride(0)),
            table.stride(), is_valid.stride(0),
        ),
        rows.requests,
        *table.shape,
        rows.reach,
        GROUP=group,
        GROUPS=shape._replace(
            rows=tile // RUN, run=RUN, threads=min(32 * warps, tile // RUN), parts=cdiv(best.stride(0), tile)
        ),
        SHAPE=shape,
        num_warps=warps,
        **pdl_option(dependent),
    )  # fmt: skip
