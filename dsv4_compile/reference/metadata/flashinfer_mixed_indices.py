"""One index matrix for a batch of decodes, then prefills: W window columns, then P columns of compressed entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import FLASHINFER_INDEX_ALIGN, PAD_INDEX, PAD_LEN, align_up
from ..common.paging import lookup_slots
from .batch import token_positions, visible_entries
from .index_rows import to_index
from .swa_metadata import window_rows


class MixedIndicesArguments(NamedTuple):
    """Arguments of `flashinfer_mixed_indices`, in schema order.

    Attributes:
        decode_swa_indices: int32 `[Td, W]`, slots, taken as they are; W = window.
        decode_compressed_indices: int32 `[Td, K]`, slots, or indices within the request if they `are_local`; or None.
        decode_compressed_lens: int32 `[>= Td]`, entries that count if slots are given; None = all K columns.
        prefill_topk_indices: int32 `[Tp, K']`, indices within the request; `topk <= K'` of them are used.
        query_start_loc: int `[R + 1]`, seq_lens: int `[R]`, token_to_req: int `[>= Td + Tp]`: the whole batch.
        swa_block_table, compressed_block_table: int `[R, B]`; the second defaults to the first.
        decode_is_valid_token: bool `[>= Td]`, needed for local indices.
        num_rows: rows of the result, 0 = Td + Tp. Rows behind the last token are -1, with length 0.
        swa_block_span, compressed_block_span: where pages of several layers share memory, the rows from one page of a
            layer to its next, 0 = its block size. Slots are re-counted in rows: `block * span + offset`.
    """

    decode_swa_indices: Tensor
    decode_compressed_indices: Tensor | None
    decode_compressed_lens: Tensor | None
    prefill_topk_indices: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    token_to_req: Tensor
    swa_block_table: Tensor
    swa_block_size: int
    compressed_block_table: Tensor | None
    compressed_block_size: int
    window: int
    ratio: int
    topk: int
    decode_compressed_indices_are_local: bool = False
    decode_is_valid_token: Tensor | None = None
    num_rows: int = 0
    swa_block_span: int = 0
    compressed_block_span: int = 0


def flashinfer_mixed_indices(op: MixedIndicesArguments) -> tuple[Tensor, Tensor]:
    """Slots that each token attends, in both caches.


    Returns:
        int32 `[rows, W + P]`, P = max(topk, K) aligned to 16 bytes, and int32 `[rows]`: W plus the compressed entries
        that count. The window counts as W columns even where it holds fewer tokens: the rest is -1.
    """
    num_decode, num_prefill = op.decode_swa_indices.shape[0], op.prefill_topk_indices.shape[0]
    compressed_table = op.swa_block_table if op.compressed_block_table is None else op.compressed_block_table
    compressed = op.decode_compressed_indices
    if compressed is None:
        compressed = op.decode_swa_indices.new_empty(num_decode, 0)
    width = align_up(max(op.topk, compressed.shape[1]), FLASHINFER_INDEX_ALIGN)

    if op.decode_compressed_indices_are_local and op.decode_is_valid_token is not None:
        decode_entries, decode_lens = _local_decode_entries(
            compressed,
            op.token_to_req[:num_decode],
            compressed_table,
            op.compressed_block_size,
            op.decode_is_valid_token[:num_decode],
        )
    else:
        decode_entries = compressed
        decode_lens = _given_lens(compressed, op.decode_compressed_lens)

    tokens = torch.arange(num_decode, num_decode + num_prefill, device=op.token_to_req.device)
    requests = op.token_to_req[num_decode : num_decode + num_prefill]
    positions = token_positions(op.query_start_loc, op.seq_lens, requests, tokens)
    prefill_window, _ = window_rows(positions, requests, op.swa_block_table, op.window, op.swa_block_size)
    prefill_lens = visible_entries(positions, op.ratio).clamp_max(op.topk).to(torch.int32)
    columns = torch.arange(op.topk, device=tokens.device)
    local = torch.where(columns < prefill_lens[:, None], op.prefill_topk_indices[:, : op.topk], PAD_INDEX)
    prefill_entries = to_index(lookup_slots(compressed_table, requests[:, None], local, op.compressed_block_size))

    in_window = torch.cat((op.decode_swa_indices, prefill_window))
    entries = torch.cat((_widen(decode_entries, width), _widen(prefill_entries, width)))
    in_window = _respan(in_window, op.swa_block_size, op.swa_block_span)
    entries = _respan(entries, op.compressed_block_size, op.compressed_block_span)
    lens = torch.cat((decode_lens, prefill_lens)) + op.window
    padding = max(op.num_rows - num_decode - num_prefill, 0)
    indices = torch.nn.functional.pad(torch.cat((in_window, entries), 1), (0, 0, 0, padding), value=PAD_INDEX)
    return indices, torch.nn.functional.pad(lens, (0, padding), value=PAD_LEN)


def _local_decode_entries(
    local: Tensor, requests: Tensor, block_table: Tensor, block_size: int, is_valid_token: Tensor
) -> tuple[Tensor, Tensor]:
    """Slots int32 `[Td, K]` of indices within the request, all -1 for invalid tokens; and how many there are."""
    local = torch.where(is_valid_token[:, None], local, PAD_INDEX)
    slots = to_index(lookup_slots(block_table, requests[:, None], local, block_size))
    return slots, (slots >= 0).sum(1, dtype=torch.int32)


def _given_lens(slots: Tensor, lens: Tensor | None) -> Tensor:
    """How many of the given slots `[Td, K]` count, int32 `[Td]`."""
    tokens, width = slots.shape
    if lens is None:
        return slots.new_full((tokens,), width, dtype=torch.int32)
    return lens[:tokens].clamp(0, width).to(torch.int32)


def _widen(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=PAD_INDEX)


def _respan(slots: Tensor, block_size: int, span: int) -> Tensor:
    """Slots re-counted for pages `span` rows apart; -1 stays."""
    if span in (0, block_size):
        return slots
    wide = slots.long()
    return to_index(torch.where(wide >= 0, wide // block_size * span + wide % block_size, PAD_INDEX))
