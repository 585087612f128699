"""From the indexer's choice, indices within a request, to slots of the paged cache; dense rows and ragged lists."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_LEN
from ..common.paging import lookup_slots
from .index_rows import flatten_rows, pack_rows, to_index


def global_topk(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Map each index to its slot, column by column, and count the mapped ones.

    Args:
        topk_indices: int `[T, K]` or `[T, 1, K]`, valid entries first, -1 behind.
        token_to_req: int `[N]`, is_valid_token: bool `[N]`, N >= T; block_table: int `[R, B]`.
        block_size: entries of a page.

    Returns:
        Slots int32 `[T, K]`, and int32 `[T]`: how many are not -1; 0 for an invalid token. Positions are kept: an index
        that maps to nothing (negative, request or block out of range) leaves -1 in its column and is not counted.
    """
    rows = topk_indices.flatten(1)
    tokens = rows.shape[0]
    slots = to_index(lookup_slots(block_table, token_to_req[:tokens, None], rows, block_size))
    counts = (slots >= 0).sum(1, dtype=torch.int32)
    return slots, torch.where(is_valid_token[:tokens], counts, PAD_LEN)


def global_topk_ragged(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of `global_topk` that are not -1, in order, as one list.

    Returns `flat` int32 `[T * K]` with a -1 tail, `indptr` int32 `[T + 1]` and `lens` int32 `[T]`: token t's slots are
    `flat[indptr[t] : indptr[t] + lens[t]]`.
    """
    slots, lens = global_topk(topk_indices, token_to_req, block_table, is_valid_token, block_size)
    packed, _ = pack_rows(slots, slots >= 0)
    return *flatten_rows(packed, lens), lens
