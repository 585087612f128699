"""Exact selection of the K largest order keys of a row, listed in ascending column order.

The boundary is found by bisection. At least K keys are >= lo and fewer than K are >= hi; each pass counts the keys from
the middle on, and one that counts K ends the search. Keys >= hi are taken, and of those in [lo, hi), which are equal by
then, the first ones that fit. Columns are written as they are, or as the cache slots that a block table has for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import PAD_INDEX
from .global_topk import NO_LEN, map_entries
from .indexer_score import INVISIBLE, order_key, visible_entries
from .quant import MAGNITUDE

ROW_ALIGN = 16
"""The keys of a row that exist, in memory if not in meaning, are a multiple of this."""
PAD = tl.constexpr(PAD_INDEX)
SMOOTH_PASSES = tl.constexpr(14)
NARROW_EVERY = tl.constexpr(4)
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
VECTOR = tl.constexpr(ROW_ALIGN)
HALF_BITS = tl.constexpr(16)
HALF_MASK = tl.constexpr((1 << 16) - 1)


@triton.jit
def _load_tile(p_row, start, length, TILE: tl.constexpr):
    """int32 `[TILE]` keys from column `start` on, invisible behind the row."""
    column = start + tl.arange(0, TILE)
    # Whole vectors are read: a row of the workspace is longer than the keys in it.
    key = tl.load(p_row + column, mask=column < tl.cdiv(length, VECTOR) * VECTOR, other=INVISIBLE)
    return tl.where(column < length, key, INVISIBLE)


@triton.jit
def _middle(lo, hi, passes):
    """A key between lo and hi.

    At first that of the mean of their logits, which comes near the boundary of smooth data soon; later their own mean,
    which ends the search after 32 more passes whatever the data.
    """
    # The mean of two integers whose sum may not fit.
    of_keys = (lo & hi) + ((lo ^ hi) >> 1)
    of_logits = order_key(0.5 * _logit(lo) + 0.5 * _logit(hi))
    return tl.where((passes < SMOOTH_PASSES) & (of_logits > lo) & (of_logits < hi), of_logits, of_keys)


@triton.jit
def _logit(key):
    """float32 logit of an order key; NaN for keys that belong to none."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(p_row, head, length, lo, hi, TILE: tl.constexpr):
    """Bounds as tight as the keys between them allow: the smallest key >= lo, and one more than the largest < hi."""
    column = tl.arange(0, TILE)
    smallest = tl.where((head >= lo) & (column < length), head, LAST)
    largest = tl.where(head < hi, head, INVISIBLE)
    for start in range(TILE, length, TILE):
        key = _load_tile(p_row, start, length, TILE)
        smallest = tl.minimum(smallest, tl.where((key >= lo) & (start + column < length), key, LAST))
        largest = tl.maximum(largest, tl.where(key < hi, key, INVISIBLE))
    return tl.min(smallest, axis=0), tl.max(largest, axis=0) + 1


@triton.jit
def _boundary(p_row, head, length, K: tl.constexpr, TILE: tl.constexpr):
    """lo, hi and the number of keys >= hi for a row of more than K columns, of which `head` is the first tile."""
    lo, hi = _narrow(p_row, head, length, INVISIBLE, LAST, TILE)
    above, passes = tl.zeros_like(lo), tl.zeros_like(lo)
    while (hi - lo != 1) & (above != K):
        middle = _middle(lo, hi, passes)
        hits = (head >= middle).to(tl.int32)
        for start in range(TILE, length, TILE):
            hits += (_load_tile(p_row, start, length, TILE) >= middle).to(tl.int32)
        count = tl.sum(hits, axis=0)
        lo = tl.where(count >= K, middle, lo)
        hi = tl.where(count <= K, middle, hi)
        above = tl.where(count <= K, count, above)
        passes += 1
        # A long search may be one between few keys, all equal perhaps.
        if (passes >= SMOOTH_PASSES) & (passes % NARROW_EVERY == 0) & (above != K):
            lo, hi = _narrow(p_row, head, length, lo, hi, TILE)
    return lo, hi, above


@triton.jit
def _take(p_out, key, start, lo, hi, room, above, equal, p_map, map_stride, map_columns, TILE, PAGE: tl.constexpr):
    """Write the taken columns of a tile, and give how many columns before the next tile are above, and equal.

    `above` and `equal` are those before this one. With PAGE slots are written, and how many there are comes third.
    """
    is_above = key >= hi
    is_equal = (key >= lo) & (key < hi)
    # Both counts in one scan: a tile has fewer columns than fit in half a word.
    both = (is_above.to(tl.int32) << HALF_BITS) | is_equal.to(tl.int32)
    before = tl.cumsum(both, axis=0) - both
    rank = equal + (before & HALF_MASK)
    place = above + (before >> HALF_BITS) + tl.minimum(rank, room)
    value, taken = start + tl.arange(0, TILE), is_above | (is_equal & (rank < room))
    mapped = tl.zeros_like(above)
    if PAGE > 0:
        value, live = map_entries(p_map, map_stride, map_columns, value, taken, PAGE)
        mapped = tl.sum(live.to(tl.int32), axis=0)
    tl.store(p_out + place, value, mask=taken)
    total = tl.sum(both, axis=0)
    return above + (total >> HALF_BITS), equal + (total & HALF_MASK), mapped


@triton.jit(
    do_not_specialize=["table_rows", "map_rows", "map_columns", "reach"],
    do_not_specialize_on_alignment=["p_requests", "p_lens", "p_map", "p_is_valid"],
)
def select_topk_kernel(
    p_out,  # [T, K] int32, contiguous
    p_counts,  # [T] int32, contiguous; with PAGE only, as are the others of the map
    p_keys,  # [T, >= reach, a multiple of ROW_ALIGN] int32 order keys of the context
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    p_map,  # [map_rows, map_columns] int
    p_is_valid,  # [>= T] bool
    key_stride,
    token_strides,  # of requests and lens
    map_strides,
    valid_stride,
    table_rows,
    map_rows,
    map_columns,
    reach,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program p selects for token p. The first TILE keys of a row stay in registers, the others are read again.

    With PAGE, entries of a block of the map, slots are written in the place of columns, and how many there are.
    """
    token = tl.program_id(0).to(tl.int64)
    _, length = visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach)
    p_row, p_selected = p_keys + token * key_stride, p_out + token * K
    p_map_row, columns = p_map, map_columns
    if PAGE > 0:
        request = tl.load(p_requests + token * token_strides[0]).to(tl.int64)
        known = (request >= 0) & (request < map_rows)
        p_map_row, columns = p_map + tl.where(known, request, 0) * map_strides[0], tl.where(known, map_columns, 0)
    head = _load_tile(p_row, 0, length, TILE)
    # A context that fits is taken whole, but for what is not visible.
    lo, hi, above = tl.full((), INVISIBLE, tl.int32), tl.full((), INVISIBLE + 1, tl.int32), tl.full((), K, tl.int32)
    if length > K:
        lo, hi, above = _boundary(p_row, head, length, K, TILE)
    # Invisible columns never fill the row.
    room = tl.where(lo == INVISIBLE, 0, K - above)
    none = tl.zeros_like(above)
    taken, equal, count = _take(
        p_selected, head, 0, lo, hi, room, none, none, p_map_row, map_strides[1], columns, TILE, PAGE
    )
    for start in range(TILE, length, TILE):
        key = _load_tile(p_row, start, length, TILE)
        taken, equal, mapped = _take(
            p_selected, key, start, lo, hi, room, taken, equal, p_map_row, map_strides[1], columns, TILE, PAGE
        )
        count += mapped
    o_k = tl.arange(0, PADDED_K)
    tl.store(p_selected + o_k, PAD, mask=(o_k >= taken + tl.minimum(equal, room)) & (o_k < K))
    if PAGE > 0:
        is_valid = tl.load(p_is_valid + token * valid_stride)
        tl.store(p_counts + token, tl.where(is_valid, count, NO_LEN))


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
) -> None:
    """Write the best columns of each row of `keys`, or with `slots` theirs, to `out` `[T, K]`, one program a token.

    `tile` is the number of keys that stay in registers, and warps.
    """
    topk, columns = out.shape[1], min(tile[0], triton.next_power_of_2(keys.stride(0)))
    # Without a map the kernel touches none of its arguments.
    counts, table, is_valid, page = slots or SlotMap(out, out, out[:, 0], 0)
    select_topk_kernel[(out.shape[0],)](
        out,
        counts,
        keys,
        token_to_req,
        lens,
        table,
        is_valid,
        keys.stride(0),
        (token_to_req.stride(0), lens.stride(0)),
        table.stride(),
        is_valid.stride(0),
        table_rows,
        table.shape[0],
        table.shape[1],
        reach,
        K=topk,
        PADDED_K=triton.next_power_of_2(topk),
        TILE=columns,
        PAGE=page,
        num_warps=min(tile[1], max(1, columns // 256)),
    )
