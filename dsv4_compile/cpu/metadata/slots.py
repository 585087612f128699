"""Slots of tokens, and of the rows they see, in one pass each; None where the C++ kernels cannot read the tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import native


def token_slots(
    positions: Tensor, requests: Tensor, tables: Sequence[Tensor], ratios: Sequence[int], block_sizes: Sequence[int]
) -> Tensor | None:
    """Return int64 `[G, T]`: a token's slot in each group, -1 if it has none or completes no entry."""
    if not native.takes(int64=(positions, requests), int32=tables):
        return None
    slots = torch.empty((len(tables), positions.shape[0]), dtype=torch.int64)
    for row, table, ratio, block in zip(slots, tables, ratios, block_sizes, strict=True):
        native.call("token_slots", positions, requests, table, row, positions.shape[0], *table.shape, ratio, block)
    return slots


def listed_slots(
    table: Tensor, requests: Tensor, begins: Tensor, counts: Tensor, width: int, block_size: int
) -> Tensor | None:
    """Return int32 `[T, width]`: slots of `counts` rows of each token's request from `begins` on, -1 beyond them."""
    if not native.takes(int64=(requests, begins, counts), int32=(table,)):
        return None
    slots = torch.empty((requests.shape[0], width), dtype=torch.int32)
    native.call("listed_slots", begins, counts, requests, table, slots, *slots.shape, *table.shape, block_size)
    return slots
