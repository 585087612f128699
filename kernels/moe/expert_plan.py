"""Plan of `moe_experts`: places sorted by expert, split into tiles of one expert each.

Nothing goes through the host: there are as many tiles as there may have to be. The order of an expert's places is that
of the tokens. Of few places, a CTA plans some and looks at all, without waiting for other CTAs (`plan_some`). Of many,
a CTA counts MOST_PLACES in a first launch, and sorts them in a second one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..host.launch import launch_kernel

MOST_PLACES = 512
"""Places that a CTA sorts, in registers."""
TILE_ROWS = tl.constexpr(32)  # tiles that a CTA describes at a time
WARPS = 8
NO_TILE = tl.constexpr(-1)
FIELDS = tl.constexpr(4)  # of a tile: its expert, its first place in `order`, the end of its expert's places, unused


class SortShape(NamedTuple):
    """Compile-time sizes of a plan of many places.

    Attributes:
        experts: of this rank. block, tile: places that a CTA sorts, and those of a tile.
        programs_pow2: programs, rounded up to a power of two.
    """

    experts: int
    block: int
    tile: int
    programs_pow2: int


class PlanShape(NamedTuple):
    """Compile-time sizes of a plan of few places.

    Attributes:
        experts: of this rank. block, tile: places that a CTA plans, and those of a tile.
        places_pow2, tiles_pow2: places and tiles, rounded up to powers of two.
    """

    experts: int
    block: int
    tile: int
    places_pow2: int
    tiles_pow2: int


@triton.jit
def local_expert(p_ids, o_place, mask, first_expert, EXPERTS: tl.constexpr):
    """Return the int32 row of the weights for each place, -1 for an id of no expert here."""
    local = tl.load(p_ids + o_place, mask, -1).to(tl.int64) - first_expert
    return tl.where(mask & (local >= 0) & (local < EXPERTS), local, -1).to(tl.int32)


@triton.jit
def _count(local, EXPERTS_POW2: tl.constexpr):
    """Return how many of the places each expert has."""
    return tl.histogram(tl.maximum(local, 0), EXPERTS_POW2, mask=local >= 0)


@triton.jit(do_not_specialize=["places", "first_expert"])
def count_places_kernel(
    p_counts,  # [programs, EXPERTS_POW2] int32
    p_ids,  # [places] int, contiguous
    places,
    first_expert,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the places of each expert among BLOCK of them."""
    o_place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = local_expert(p_ids, o_place, o_place < places, first_expert, EXPERTS)
    p_row = p_counts + tl.program_id(0) * EXPERTS_POW2 + tl.arange(0, EXPERTS_POW2)
    tl.store(p_row, _count(local, EXPERTS_POW2))


@triton.jit(do_not_specialize=["places", "first_expert", "tiles"])
def sort_places_kernel(
    p_order,  # [places] int32
    p_tiles,  # [tiles, FIELDS] int32
    p_cursor,  # [programs, EXPERTS_POW2] int32
    p_counts,  # [programs, EXPERTS_POW2] int32
    p_ids,  # [places] int, contiguous
    places,
    first_expert,
    tiles,
    SHAPE: tl.constexpr,
):
    """Write where a block of places come in `order`, and describe a share of the tiles."""
    EXPERTS: tl.constexpr = SHAPE.experts
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(EXPERTS)
    BLOCK: tl.constexpr = SHAPE.block
    TILE: tl.constexpr = SHAPE.tile
    me, programs = tl.program_id(0), tl.num_programs(0)
    o_place, o_e = me * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS_POW2)
    local = local_expert(p_ids, o_place, o_place < places, first_expert, EXPERTS)
    o_p = tl.arange(0, SHAPE.programs_pow2)
    p_all = p_counts + o_p[:, None] * EXPERTS_POW2 + o_e[None, :]
    counts = tl.load(p_all, (o_p < programs)[:, None], 0)
    total = tl.sum(counts, 0)
    before = tl.sum(tl.where((o_p < me)[:, None], counts, 0), 0)
    mine = tl.sum(tl.where((o_p == me)[:, None], counts, 0), 0)
    starts = tl.cumsum(total, 0) - total
    # Place n of the sorted block goes to cursor + n, where cursor takes off the places of smaller experts in the block.
    tl.store(p_cursor + me * EXPERTS_POW2 + o_e, starts + before - (tl.cumsum(mine, 0) - mine))
    tl.debug_barrier()
    keys = tl.sort(tl.where(local >= 0, local, EXPERTS) * BLOCK + tl.arange(0, BLOCK))
    expert, index = keys // BLOCK, keys % BLOCK
    cursor = tl.load(p_cursor + me * EXPERTS_POW2 + expert, expert < EXPERTS, 0)
    tl.store(p_order + cursor + tl.arange(0, BLOCK), me * BLOCK + index, expert < EXPERTS)

    each = (total + TILE - 1) // TILE
    ends = tl.cumsum(each, 0)
    for first in range(me * TILE_ROWS, tiles, programs * TILE_ROWS):
        o_tile = first + tl.arange(0, TILE_ROWS)
        passed = ends[None, :] <= o_tile[:, None]
        owner = tl.sum(passed.to(tl.int32), 1)
        before_owner = tl.max(tl.where(passed, ends[None, :], 0), 1)
        is_owner = o_e[None, :] == owner[:, None]
        start = tl.sum(tl.where(is_owner, starts[None, :], 0), 1)
        end = start + tl.sum(tl.where(is_owner, total[None, :], 0), 1)
        p_tile, mask = p_tiles + o_tile * FIELDS, o_tile < tiles
        tl.store(p_tile, tl.where(owner < EXPERTS, owner, NO_TILE), mask)
        tl.store(p_tile + 1, start + (o_tile - before_owner) * TILE, mask)
        tl.store(p_tile + 2, end, mask)


@triton.jit
def plan_some(p_tiles, p_ids, me, places, first_expert, tiles, SHAPE: tl.constexpr):
    """Write places `me * BLOCK` and following where they belong in tiles [tiles, 2 + TILE] int32.

    A tile has its expert, the number of its places, and those. Program 0 marks the tiles that are not used.
    """
    EXPERTS: tl.constexpr = SHAPE.experts
    EXPERTS_POW2: tl.constexpr = triton.next_power_of_2(EXPERTS)
    BLOCK: tl.constexpr = SHAPE.block
    TILE: tl.constexpr = SHAPE.tile
    o_all, o_e = tl.arange(0, SHAPE.places_pow2), tl.arange(0, EXPERTS_POW2)
    other = local_expert(p_ids, o_all, o_all < places, first_expert, EXPERTS)
    count = _count(other, EXPERTS_POW2)
    each = (count + TILE - 1) // TILE
    first_tile = tl.cumsum(each, 0) - each
    o = me * BLOCK + tl.arange(0, BLOCK)
    expert = local_expert(p_ids, o, o < places, first_expert, EXPERTS)
    before = (other[None, :] == expert[:, None]) & (o_all[None, :] < o[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    mine = o_e[None, :] == expert[:, None]
    left = tl.sum(tl.where(mine, count[None, :], 0), 1) - rank
    tile = tl.sum(tl.where(mine, first_tile[None, :], 0), 1) + rank // TILE
    p_tile = p_tiles + tile * (2 + TILE)
    tl.store(p_tile + 2 + rank % TILE, o, expert >= 0)
    first = (expert >= 0) & (rank % TILE == 0)
    tl.store(p_tile, expert, first)
    tl.store(p_tile + 1, tl.minimum(left, TILE), first)
    o_tile = tl.arange(0, SHAPE.tiles_pow2)
    unused = (o_tile >= tl.sum(each, 0)) & (o_tile < tiles) & (me == 0)
    tl.store(p_tiles + o_tile * (2 + TILE), NO_TILE, unused)


@triton.jit
def tile_places(p_tile, TILE: tl.constexpr):
    """Return int64 places of a tile that `plan_some` wrote, and their mask."""
    o_place = tl.arange(0, TILE)
    mask = o_place < tl.load(p_tile + 1)
    return tl.load(p_tile + 2 + o_place, mask, 0).to(tl.int64), mask


def most_tiles(places: int, experts: int, tile: int) -> int:
    """Return the largest number of tiles that `places` places of `experts` experts may need."""
    return places // tile + min(places, experts)


def sort_programs(places: int) -> int:
    """Return the CTAs that sort `places` places."""
    return cdiv(places, MOST_PLACES)


def plan_places(ids: Tensor, first_expert: int, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sort the places of contiguous `ids` by expert.

    Returns:
        order: int32 `[places]`, places sorted by expert, then by place; those of no expert are left out at the end.
        tiles: int32 `[most_tiles, 4]`: expert, or -1 for an unused tile, its first place in `order`, and the end of its
            expert's places there.
    """
    places, programs = ids.numel(), sort_programs(ids.numel())
    experts_pow2 = triton.next_power_of_2(experts)
    order = torch.empty(places, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((most_tiles(places, experts, tile), FIELDS.value), dtype=torch.int32, device=ids.device)
    scratch = torch.empty((2, programs, experts_pow2), dtype=torch.int32, device=ids.device)
    launch_kernel(
        count_places_kernel, (programs,), scratch[1], ids, places, first_expert, EXPERTS=experts,
        EXPERTS_POW2=experts_pow2, BLOCK=MOST_PLACES, num_warps=WARPS,
    )  # fmt: skip
    launch_kernel(
        sort_places_kernel,
        (programs,),
        order,
        tiles,
        scratch[0],
        scratch[1],
        ids,
        places,
        first_expert,
        len(tiles),
        SHAPE=SortShape(experts, MOST_PLACES, tile, triton.next_power_of_2(programs)),
        num_warps=WARPS,
    )
    return order, tiles
