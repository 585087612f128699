"""State rows of the compressor: each half is written where it belongs, without a row in between."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.preprocess import save_partial_states as reference
from .. import native
from ..common.rows import with_slots


def save_partial_states(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    """Compute the op of this name as its reference does, bit for bit."""
    if not state_cache.is_contiguous():
        reference.save_partial_states(kv_score, ape, state_cache, state_slot_mapping, positions, block_size)
        return
    rows, width = state_slot_mapping.shape[0], ape.shape[1]
    if native.takes(ape, state_cache, rows=kv_score, int64=(state_slot_mapping, positions)):
        where = kv_score, kv_score.stride(0), ape, state_cache, state_slot_mapping, positions
        capacity = state_cache.shape[0] * block_size
        native.call("save_partial_states", *where, rows, capacity, width, ape.shape[0])
        return
    slots, kv_score, positions = with_slots(state_slot_mapping, state_cache.shape[0], block_size, kv_score, positions)
    if slots.shape[0] == 0:
        return
    states = state_cache.view(-1, 2 * width)
    bias = ape.index_select(0, positions % ape.shape[0]).float()
    states.index_copy_(0, slots, torch.cat((kv_score[:, :width], kv_score[:, width:] + bias), dim=1))
