"""All metadata of a step in one op: what every attention layer needs to know, derived from ends, lengths and tables.

Each quantity is computed by the function that also defines the op of that name; this file says only what goes where.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import CSA_RATIO, HCA_RATIO, PAD_INDEX, state_block_size, storage_block_size
from ..common.paging import lookup_slots
from .batch import token_positions, token_requests, visible_entries
from .c128a_topk_metadata import entry_lens, entry_slot_rows
from .compressed_slot_mapping import compressed_slots
from .swa_metadata import window_rows


class BatchMetadataArguments(NamedTuple):
    """Arguments of `batch_metadata`, in schema order.

    Attributes:
        query_start_loc: int `[R + 1]`, first token of each request and the end of the last; padded requests repeat it.
        seq_lens: int `[R]`, tokens of each request, this step's query included; 0 for padded requests.
        slot_mapping: int `[M]`, the engine's own raw slots, or None: tokens of a negative slot, and those behind
            token M, are padding. Slots themselves come from the block tables.
        *_block_table: int `[R, B]` by group of caches, as in `metadata.BlockTables`; None leaves out the group and its
            buffers, those with the prefix of the table's name.
        window_block_size: tokens of a page of the window's cache.
        positions: int64 `[N]`, 0 for padding.
        token_to_req: int32 `[N]`, 0 for padding.
        is_valid_token: bool `[N]`, False for padding.
        window_slots: int64 `[N]`; window_indices: int32 `[N, W]`; window_lens: int32 `[N]`: see `window_rows`.
        c4_slots, indexer_slots, c128_slots: int64 `[N]`, slot of the entry that a token completes, -1 for others.
        *_state_slots: int64 `[N]`, where a token's compressor state goes.
        c128_indices: int32 `[N, C]`, c128_lens: int32 `[N]`: slots of all visible entries, -1 behind them, and how many
            of the columns count.
        c4_context_lens, c128_context_lens: int32 `[N]`, entries that a token may see; they belong to no table.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor | None
    window_block_table: Tensor | None
    c4_block_table: Tensor | None
    c4_state_block_table: Tensor | None
    indexer_block_table: Tensor | None
    indexer_state_block_table: Tensor | None
    c128_block_table: Tensor | None
    c128_state_block_table: Tensor | None
    window_block_size: int
    positions: Tensor
    token_to_req: Tensor
    is_valid_token: Tensor
    window_slots: Tensor | None = None
    window_indices: Tensor | None = None
    window_lens: Tensor | None = None
    c4_slots: Tensor | None = None
    c4_state_slots: Tensor | None = None
    indexer_slots: Tensor | None = None
    indexer_state_slots: Tensor | None = None
    c128_slots: Tensor | None = None
    c128_indices: Tensor | None = None
    c128_lens: Tensor | None = None
    c128_state_slots: Tensor | None = None
    c4_context_lens: Tensor | None = None
    c128_context_lens: Tensor | None = None


def batch_metadata(op: BatchMetadataArguments) -> None:
    """Fill the metadata of a batch of up to N tokens in place, every row of every buffer.


    Tokens of no request, tokens behind the last one, and all tokens of a request shorter than its query are padding:
    slot -1, index -1, length 0. Pages that do not exist give -1. The values equal those of
    `metadata.build_batch_metadata`, bit for bit; nothing depends on the previous contents of the buffers.
    """
    tokens = torch.arange(op.positions.shape[0], device=op.query_start_loc.device)
    requests = token_requests(op.query_start_loc, tokens)
    positions = token_positions(op.query_start_loc, op.seq_lens, requests, tokens)
    if op.slot_mapping is not None:
        positions = torch.where(_placed(op.slot_mapping, tokens), positions, PAD_INDEX)
    valid = positions >= 0
    requests = torch.where(valid, requests, 0)
    op.positions.copy_(positions.clamp_min(0))
    op.token_to_req.copy_(requests)
    op.is_valid_token.copy_(valid)

    if op.window_block_table is not None and op.window_indices is not None:
        width = op.window_indices.shape[1]
        rows, lens = window_rows(positions, requests, op.window_block_table, width, op.window_block_size)
        _fill(op.window_slots, lookup_slots(op.window_block_table, requests, positions, op.window_block_size))
        op.window_indices.copy_(rows)
        _fill(op.window_lens, lens)

    def entries(table: Tensor | None, slots: Tensor | None, ratio: int) -> None:
        if table is not None:
            _fill(slots, compressed_slots(positions, requests, table, storage_block_size(ratio), ratio))

    def states(table: Tensor | None, slots: Tensor | None, ratio: int) -> None:
        if table is not None:
            _fill(slots, lookup_slots(table, requests, positions, state_block_size(ratio)))

    entries(op.c4_block_table, op.c4_slots, CSA_RATIO)
    states(op.c4_state_block_table, op.c4_state_slots, CSA_RATIO)
    entries(op.indexer_block_table, op.indexer_slots, CSA_RATIO)
    states(op.indexer_state_block_table, op.indexer_state_slots, CSA_RATIO)
    entries(op.c128_block_table, op.c128_slots, HCA_RATIO)
    states(op.c128_state_block_table, op.c128_state_slots, HCA_RATIO)
    _fill(op.c4_context_lens, visible_entries(positions, CSA_RATIO))
    _fill(op.c128_context_lens, visible_entries(positions, HCA_RATIO))
    if op.c128_block_table is not None and op.c128_indices is not None:
        width = op.c128_indices.shape[1]
        lens = entry_lens(positions, HCA_RATIO, width)
        op.c128_indices.copy_(
            entry_slot_rows(lens, requests, op.c128_block_table, width, storage_block_size(HCA_RATIO))
        )
        _fill(op.c128_lens, lens)


def _placed(slot_mapping: Tensor, tokens: Tensor) -> Tensor:
    """bool `[N]`: whether the engine gave each token a slot; it gives none to those behind its mapping."""
    rows = slot_mapping.shape[0]
    if rows == 0:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return (tokens < rows) & (slot_mapping[tokens.clamp_max(rows - 1)] >= 0)


def _fill(out: Tensor | None, values: Tensor) -> None:
    if out is not None:
        out.copy_(values)
