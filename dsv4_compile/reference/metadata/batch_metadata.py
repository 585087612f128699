"""All metadata of a step in one op: what every attention layer needs to know, derived from ends, lengths and tables.

Each quantity is computed by the function that also defines the op of that name; this file says only what goes where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX
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
        block_tables: int `[R, B]` of each group of caches, see `sources.groups_of`.
        row_tokens: tokens that a row of each group stands for; page_rows: rows of its pages.
        positions: int64 `[N]`, 0 for padding.
        token_to_req: int32 `[N]`, 0 for padding.
        is_valid_token: bool `[N]`, False for padding.
        slots: int64 `[N]` of each group, slot of the row that a token completes, -1 for others.
        listed: groups, by their places in `block_tables`, with a list of rows for each token.
        indices: int32 `[N, C]` of each listed group: slots of the last C tokens in a group with a row for every
            token, else of the first C visible entries; -1 behind them. lens: int32 `[N]`, how many columns count.
        ratios: compress ratios of `context_lens`: int32 `[N]` each, entries that a token may see.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor | None
    block_tables: Sequence[Tensor]
    row_tokens: Sequence[int]
    page_rows: Sequence[int]
    positions: Tensor
    token_to_req: Tensor
    is_valid_token: Tensor
    slots: Sequence[Tensor]
    listed: Sequence[int]
    indices: Sequence[Tensor]
    lens: Sequence[Tensor]
    ratios: Sequence[int]
    context_lens: Sequence[Tensor]


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
    groups = [*zip(op.block_tables, op.page_rows, op.row_tokens, strict=True)]
    for slots, group in zip(op.slots, groups, strict=True):
        slots.copy_(compressed_slots(positions, requests, *group))
    for place, indices, lens in zip(op.listed, op.indices, op.lens, strict=True):
        rows, counts = listed_rows(positions, requests, *groups[place], indices.shape[1])
        indices.copy_(rows)
        lens.copy_(counts)
    for ratio, context_lens in zip(op.ratios, op.context_lens, strict=True):
        context_lens.copy_(visible_entries(positions, ratio))


def listed_rows(
    positions: Tensor, requests: Tensor, block_table: Tensor, page_rows: int, row_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the slots that each token's list holds, int32 `[T, width]` with a -1 tail, and their number int32 `[T]`.

    These are the last tokens of its request where a row is a token, else all entries that it may see.
    """
    if row_tokens == 1:
        return window_rows(positions, requests, block_table, width, page_rows)
    lens = entry_lens(positions, row_tokens, width)
    return entry_slot_rows(lens, requests, block_table, width, page_rows), lens


def _placed(slot_mapping: Tensor, tokens: Tensor) -> Tensor:
    """bool `[N]`: whether the engine gave each token a slot; it gives none to those behind its mapping."""
    rows = slot_mapping.shape[0]
    if rows == 0:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return (tokens < rows) & (slot_mapping[tokens.clamp_max(rows - 1)] >= 0)
