"""The sliding window of each token: the slots of the last W tokens of its request, itself included."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_LEN
from ..common.paging import lookup_slots
from .batch import token_positions, token_requests
from .index_rows import to_index, write_prefix


def window_rows(
    positions: Tensor, requests: Tensor, block_table: Tensor, window: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Slots of each token's window in order of position, int32 `[T, W]` with a -1 tail; and their number, int32 `[T]`.

    Args:
        positions: int64 `[T]`, negative for padding, which gets length 0.
        requests: int `[T]`; block_table: int `[R, B]`, pages of `block_size` tokens.
    """
    lens = (positions + 1).clamp(0, window)
    columns = torch.arange(window, device=positions.device)
    first = positions - lens + 1
    logical = torch.where(columns < lens[:, None], first[:, None] + columns, PAD_INDEX)
    slots = lookup_slots(block_table, requests[:, None], logical, block_size)
    return to_index(slots), lens.to(torch.int32)


class SwaMetadataArguments(NamedTuple):
    """Arguments of `swa_metadata`, in schema order.

    Attributes:
        query_start_loc: int `[R + 1]`; seq_lens: int `[R]`; block_table: int `[R, B]`, pages of `block_size` tokens.
        slot_mapping: int `[T]`, raw slots; -1 marks padding.
        num_decode_tokens: tokens that get a window row; T gives every token one.
        token_to_req: int32 `[N]`, N >= T: request of each token, 0 for tokens of no request.
        is_valid_token: bool `[N]`: whether the token's slot is valid.
        swa_indices: int32 `[N, W]` or `[N, 1, W]`, swa_lens: int32 `[N]`: see `window_rows`.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    window: int
    num_decode_tokens: int
    token_to_req: Tensor
    is_valid_token: Tensor
    swa_indices: Tensor
    swa_lens: Tensor


def swa_metadata(op: SwaMetadataArguments) -> None:
    """Fill the window buffers of a batch; its first `num_decode_tokens` tokens are decodes.


    All four buffers are written completely: 0, False, -1 and 0 where there is no token, or none with a row.
    """
    tokens = torch.arange(op.slot_mapping.shape[0], device=op.slot_mapping.device)
    requests = token_requests(op.query_start_loc, tokens)
    valid = op.slot_mapping >= 0
    write_prefix(op.token_to_req, requests.clamp_min(0).to(torch.int32), 0)
    write_prefix(op.is_valid_token, valid, False)

    decode = slice(0, op.num_decode_tokens)
    positions = token_positions(op.query_start_loc, op.seq_lens, requests[decode], tokens[decode])
    positions = torch.where(valid[decode], positions, PAD_INDEX)
    indices, lens = window_rows(positions, requests[decode], op.block_table, op.window, op.block_size)
    write_prefix(op.swa_indices.flatten(1), indices, PAD_INDEX)
    write_prefix(op.swa_lens, lens, PAD_LEN)
