"""Index rows of layers that attend every compressed entry: entry 0 to the last one visible, for each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_LEN
from ..common.paging import lookup_slots
from .batch import visible_entries
from .index_rows import to_index, write_prefix


def entry_lens(positions: Tensor, ratio: int, width: int) -> Tensor:
    """int32 `[T]`: visible entries of each token that a row of `width` columns can list. 0 for padding."""
    return visible_entries(positions, ratio).clamp_max(width).to(torch.int32)


def local_entry_rows(lens: Tensor, width: int) -> Tensor:
    """int32 `[T, width]`: 0, 1, ..., lens - 1, then -1."""
    columns = torch.arange(width, dtype=torch.int32, device=lens.device)
    return torch.where(columns < lens[:, None], columns, PAD_INDEX)


def entry_slot_rows(lens: Tensor, requests: Tensor, block_table: Tensor, width: int, block_size: int) -> Tensor:
    """int32 `[T, width]`: slots of the entries 0, ..., lens - 1 of each token's request, then -1."""
    return to_index(lookup_slots(block_table, requests[:, None], local_entry_rows(lens, width), block_size))


class C128aTopkArguments(NamedTuple):
    """Arguments of `c128a_topk_metadata`, in schema order.

    Attributes:
        positions: int64 `[T]`, negative for padding; token_to_req: int `[T]`; slot_mapping: int `[T]`, raw slots.
        block_table: int `[R, B]`, pages of `block_size` entries.
        global_decode: int32 `[N, C]`: decode token t's row lists slots. C is `layout.c128a_width`.
        decode_lens: int32 `[N]`: entries that count in that row, 0 for a token with slot -1. Such a token's row is
            still that of its position and request; only its length says that it is padding.
        prefill: int32 `[N, C]`: row t lists indices within the request, for token `num_decode_tokens + t`.
    """

    positions: Tensor
    token_to_req: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    ratio: int
    num_decode_tokens: int
    global_decode: Tensor
    decode_lens: Tensor
    prefill: Tensor


def c128a_topk_metadata(op: C128aTopkArguments) -> None:
    """Fill the index buffers of a batch; its first `num_decode_tokens` tokens are decodes.


    All three buffers are written completely: -1 and length 0 behind the last token.
    """
    decode = slice(0, op.num_decode_tokens)
    lens = entry_lens(op.positions[decode], op.ratio, op.global_decode.shape[1])
    rows = entry_slot_rows(lens, op.token_to_req[decode], op.block_table, op.global_decode.shape[1], op.block_size)
    write_prefix(op.global_decode, rows, PAD_INDEX)
    write_prefix(op.decode_lens, torch.where(op.slot_mapping[decode] >= 0, lens, PAD_LEN), PAD_LEN)
    lens = entry_lens(op.positions[op.num_decode_tokens :], op.ratio, op.prefill.shape[1])
    write_prefix(op.prefill, local_entry_rows(lens, op.prefill.shape[1]), PAD_INDEX)
