"""Slots of tokens, and of the rows that they see, for all tokens of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from .. import native


def token_slots(
    positions: Tensor, requests: Tensor, tables: Sequence[Tensor], ratios: Sequence[int], block_sizes: Sequence[int]
) -> Tensor:
    """Return int64 `[G, T]`: a token's slot in each group, -1 if it has none or completes no entry."""
    if native.takes(int64=(positions, requests), int32=tables):
        slots = torch.empty((len(tables), positions.shape[0]), dtype=torch.int64)
        for row, table, *sizes in zip(slots, tables, ratios, block_sizes, strict=True):
            native.call("token_slots", positions, requests, table, row, positions.shape[0], *table.shape, *sizes)
        return slots
    ratio, block, columns = torch.tensor([ratios, block_sizes, [table.shape[1] for table in tables]])[..., None]
    logical = positions // ratio
    column = logical // block
    known = ((positions + 1) % ratio == 0).logical_and_(positions >= 0).logical_and_(column < columns)
    places = (requests * columns).add_(column).masked_fill_(~known, 0)
    pages = [
        table.reshape(-1).index_select(0, index)
        if table.numel() > 0
        else torch.full_like(index, PAD_INDEX, dtype=table.dtype)
        for table, index in zip(tables, places.unbind(0), strict=True)
    ]
    page = torch.stack(pages)
    slots = page * block + (logical - column * block)
    return slots.masked_fill_(~known.logical_and_(page >= 0), PAD_INDEX)


def listed_slots(
    table: Tensor, requests: Tensor, begins: Tensor, counts: Tensor, width: int, block_size: int
) -> Tensor:
    """Return int32 `[T, width]`: slots of `counts` rows from `begins` on, -1 beyond them and for missing pages."""
    if native.takes(int64=(requests, begins, counts), int32=(table,)):
        slots = torch.empty((requests.shape[0], width), dtype=torch.int32)
        native.call("listed_slots", begins, counts, requests, table, slots, *slots.shape, *table.shape, block_size)
        return slots
    columns = torch.arange(width)
    logical = (begins[:, None] + columns).masked_fill_(columns >= counts[:, None], PAD_INDEX)
    if table.numel() == 0:
        return torch.full(logical.shape, PAD_INDEX, dtype=torch.int32)
    column = logical // block_size
    known = (logical >= 0).logical_and_(column < table.shape[1])
    places = (requests[:, None] * table.shape[1] + column).masked_fill_(~known, 0)
    page = table.reshape(-1).take(places)
    slots = page * block_size + (logical - column * block_size)
    return slots.masked_fill_(~known.logical_and_(page >= 0), PAD_INDEX).to(torch.int32)
