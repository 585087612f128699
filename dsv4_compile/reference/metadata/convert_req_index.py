"""From token indices within a request to slots of the paged cache, with the number of valid ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.paging import lookup_slots
from .index_rows import pack_rows, to_index


def convert_req_index(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, compact: bool = False
) -> tuple[Tensor, Tensor]:
    """Map each token index to its slot.

    Args:
        req_id: int `[N]`, N >= T; block_table: int `[R, B]`, pages of `block_size` tokens; token_indices: int `[T, K]`.
        compact: move the valid slots of a row to its front, in their order.

    Returns:
        Slots int32 `[T, K]`, -1 for a negative index or one with a request or block out of range; and the number
        of valid slots, int32 `[T]`.
    """
    slots = to_index(lookup_slots(block_table, req_id[: token_indices.shape[0], None], token_indices, block_size))
    if compact:
        return pack_rows(slots, slots >= 0)
    return slots, (slots >= 0).sum(1, dtype=torch.int32)
