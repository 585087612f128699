"""Keep what a token gives to the compressor until the last token of its group pools it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import paging


def save_partial_states(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    """Write one state row per token: its values as they are, its scores with the bias of its place in the group.

    Args:
        kv_score: float32 `[T, 2 * w]`, values then scores, w = `overlap_factor(C) * d`. Any row stride.
        ape: `[C, w]`, the score bias by `position % C`.
        state_cache: float32 `[P, S, 2 * w]`, written in place.
        state_slot_mapping: int64 `[N]`, N <= T, the raw-token slot of each row. A slot outside the cache is padding:
            its row, and row N and later, are neither read nor written. Other slots are distinct.
        positions: int `[>= N]`, absolute position of each row.
        block_size: S.
    """
    rows = state_slot_mapping.shape[0]
    kv, score = kv_score[:rows].chunk(2, dim=-1)
    bias = ape[positions[:rows].long() % ape.shape[0]].float()
    paging.write_row_slots(state_cache, block_size, state_slot_mapping, torch.cat((kv, score + bias), dim=-1))
