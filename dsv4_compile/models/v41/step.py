"""Indices of a step, computed in its graph from positions and requests: slots, visible counts, and the window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX, V41_ENTRY_BLOCK, V41_WINDOW_BLOCK
from ...reference.common.paging import lookup_slots
from .cache import V41Caches


class Tail(NamedTuple):
    """Tokens of a step that run the layers after the last source.

    Attributes:
        rows: int64 `[N]`, rows of the step, -1 for padding.
        first: int64 `[N]`, the first position that their windows hold after the last source.
    """

    rows: Tensor
    first: Tensor


class Step(NamedTuple):
    """Tokens of a step and the rows of caches that they write and read. Padding writes and reads nothing.

    Attributes:
        ids: int `[T]`, token ids; is_image: bool `[T]`.
        positions, requests: int64 `[T]`, -1 for padding.
        window_slot: int64 `[T]`, written; window_slots: int64 `[T, W]`, attended.
    """

    ids: Tensor
    is_image: Tensor
    positions: Tensor
    requests: Tensor
    window_slot: Tensor
    window_slots: Tensor

    def at(self, rows: Tensor) -> Step:
        """Return the step of some of its rows, -1 for padding."""
        live, step = rows >= 0, Step(*(values[rows] for values in self))
        return step._replace(
            positions=torch.where(live, step.positions, PAD_INDEX),
            requests=torch.where(live, step.requests, PAD_INDEX),
            window_slot=torch.where(live, step.window_slot, PAD_INDEX),
            window_slots=torch.where(live[:, None], step.window_slots, PAD_INDEX),
        )

    def with_windows_from(self, first: Tensor) -> Step:
        """Return the step with windows that hold no position before `first`."""
        width = self.window_slots.shape[1]
        held = window_positions(self.positions, width) >= first[:, None]
        return self._replace(window_slots=torch.where(held, self.window_slots, PAD_INDEX))

    def visible(self, ratio: int) -> Tensor:
        """Return int64 `[T]`: the compressed entries that a token sees, its own count in a step of several."""
        return (self.positions + 1) // ratio

    def entry_positions(self, ratio: int) -> Tensor:
        """Return int64 `[T]`: the first token of the entry that a token ends or belongs to, which RoPE rotates to."""
        return torch.where(self.positions >= 0, self.positions // ratio * ratio, 0)

    def entry_slot(self, ratio: int, table: Tensor) -> Tensor:
        """Return int64 `[T]`: the slot of the entry that a token ends, -1 where it ends none."""
        ends = (self.positions >= 0) & ((self.positions + 1) % ratio == 0)
        entry = torch.where(ends, self.positions // ratio, PAD_INDEX)
        return lookup_slots(table, self.requests, entry, V41_ENTRY_BLOCK)


def window_positions(positions: Tensor, width: int) -> Tensor:
    """Return int64 `[T, W]`: the positions of a window that ends at each token; below 0 there are none."""
    back = torch.arange(width - 1, -1, -1, device=positions.device)
    return torch.where(positions[:, None] >= 0, positions[:, None] - back, PAD_INDEX)


def make_step(
    ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches, *, window: int, image_token: int
) -> Step:
    """Return the indices of the tokens `ids` `[T]`, with windows of `window` positions.

    Logits of a position beyond `max_seq_len` are NaN, by the last row of RoPE tables, and no smaller one reads what it
    writes.
    """
    positions, requests = positions.long(), requests.long()
    inside = (positions >= 0) & (requests >= 0) & (requests < caches.window_table.shape[0])
    positions, requests = torch.where(inside, positions, PAD_INDEX), torch.where(inside, requests, PAD_INDEX)
    held = window_positions(positions, window)
    return Step(
        ids,
        ids == image_token,
        positions,
        requests,
        lookup_slots(caches.window_table, requests, positions, V41_WINDOW_BLOCK),
        lookup_slots(caches.window_table, requests[:, None], held, V41_WINDOW_BLOCK),
    )
