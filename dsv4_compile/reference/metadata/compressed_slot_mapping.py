"""Where compressed entries are written: a slot for the token that completes a group of `ratio`, -1 for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_SLOT
from ..common.paging import lookup_slots
from .batch import token_positions, token_requests
from .index_rows import write_prefix


def compressed_slots(positions: Tensor, requests: Tensor, block_table: Tensor, block_size: int, ratio: int) -> Tensor:
    """int64 `[T]`: slot of the entry that the token at `positions` completes, or -1.

    Args:
        positions: int64 `[T]`, negative for padding; requests: int `[T]`; block_table: int32 `[R, B]`.
        block_size: entries of a page.
    """
    if ratio == 1:
        return lookup_slots(block_table, requests, positions, block_size)
    completes = (positions >= 0) & ((positions + 1) % ratio == 0)
    return lookup_slots(block_table, requests, torch.where(completes, positions // ratio, PAD_INDEX), block_size)


def compressed_slot_mapping(
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    ratio: int,
    out: Tensor,
) -> None:
    """Fill `out` with the compressed slot of each token of a batch.

    Args:
        slot_mapping: int `[T]`, slots of the raw tokens; a token of -1 completes nothing.
        query_start_loc: int `[R + 1]`; seq_lens: int `[R]`, context and query of this step, 0 for padded requests.
        block_table: int `[R, B]`, pages of `block_size` entries.
        out: int64 `[N]`, N >= T; written completely, -1 behind token T.

    Tokens outside every request, requests shorter than their query and blocks that do not exist give -1.
    """
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    requests = token_requests(query_start_loc, tokens)
    positions = token_positions(query_start_loc, seq_lens, requests, tokens)
    positions = torch.where(slot_mapping >= 0, positions, PAD_INDEX)
    write_prefix(out, compressed_slots(positions, requests, block_table, block_size, ratio), PAD_SLOT)
