"""A step of vLLM as device tensors: persistent buffers, and the metadata of each group of layers inside the graph.

vLLM's decoder layers pass `positions` on to attention without looking at it. A `Step` travels in its place, so none of
vLLM's code is copied. It holds one `AttentionMetadata` for each set of block tables: V4-Flash has two groups of window
caches, so two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...layout import PAD_SLOT, cdiv
from ...metadata import AttentionMetadata, BlockTables, build_metadata
from ...reference.metadata.batch import token_requests

TableIds = Mapping[str, int]
"""Number of the block table of each group of caches that a layer has."""


@dataclass(frozen=True, slots=True)
class Step:
    """Input of the layers of one step: the metadata of each set of block tables."""

    metadata: tuple[AttentionMetadata, ...]

    @property
    def shape(self) -> torch.Size:
        """Shape of the positions that the step is passed instead of, `[T]`."""
        return self.metadata[0].positions.shape


class StepBuffers(nn.Module):
    """Persistent tensors of a step, which keep their addresses; everything else is derived from them.

    query_start_loc: int32 `[R + 1]`, first token of each request, then the number of tokens.
    slot_mapping: int64 `[T]`, negative for rows that are no tokens.
    table_0, ...: int32 `[R, B]`, one for each group of caches with blocks that are allocated together.
    bindings: how often vLLM has bound a cache of these steps.

    Args:
        window: tokens of the sliding window.
        max_num_seqs: R; max_num_batched_tokens: T; max_model_len: longest sequence.
    """

    query_start_loc: Tensor
    slot_mapping: Tensor

    def __init__(self, window: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        super().__init__()
        self.window, self.max_model_len, self.max_num_seqs = window, max_model_len, max_num_seqs
        starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        slots = torch.full((max_num_batched_tokens,), PAD_SLOT, dtype=torch.int64)
        self.register_buffer("query_start_loc", starts, persistent=False)
        self.register_buffer("slot_mapping", slots, persistent=False)
        self.bindings = 0
        self._numbers: dict[tuple[str, ...], int] = {}

    def add_table(self, owners: tuple[str, ...], block_tokens: int) -> int:
        """Return the number of the block table of these owners, which is allocated at the first call for them."""
        if owners in self._numbers:
            return self._numbers[owners]
        number = self._numbers[owners] = len(self._numbers)
        columns = cdiv(self.max_model_len, block_tokens)
        table = torch.zeros(self.max_num_seqs, columns, dtype=torch.int32, device=self.query_start_loc.device)
        self.register_buffer(f"table_{number}", table, persistent=False)
        return number

    def table(self, number: int) -> Tensor:
        """Return a block table by its number."""
        table: Tensor = getattr(self, f"table_{number}")
        return table

    def load(self, query_start_loc: Tensor, slot_mapping: Tensor) -> None:
        """Copy a step's requests `[r + 1]` and slots `[t]`; what is left over becomes padding."""
        requests, tokens = query_start_loc.shape[0], slot_mapping.shape[0]
        self.query_start_loc[:requests].copy_(query_start_loc)
        self.query_start_loc[requests:].copy_(query_start_loc[-1:].expand(self.max_num_seqs + 1 - requests))
        self.slot_mapping[:tokens].copy_(slot_mapping)  # rows after the last request are padding whatever it holds

    def load_table(self, number: int, table: Tensor) -> None:
        """Copy a step's block table `[r, b]`. Columns that no sequence reaches are left out."""
        buffer = self.table(number)
        columns = min(buffer.shape[1], table.shape[1])
        buffer[: table.shape[0], :columns].copy_(table[:, :columns])

    def clear(self) -> None:
        """Make every row padding, for a step that vLLM describes by nothing."""
        self.slot_mapping.fill_(PAD_SLOT)

    def step(self, positions: Tensor, sets: Iterable[TableIds]) -> Step:
        """Derive the metadata of the rows of `positions` `[T]`, once for each set of block tables. Traceable."""
        rows = positions.shape[0]
        requests = token_requests(self.query_start_loc, torch.arange(rows, device=positions.device))
        valid = (self.slot_mapping[:rows] >= 0) & (requests >= 0)
        return Step(tuple(self._metadata(positions, requests, valid, tables) for tables in sets))

    def _metadata(self, positions: Tensor, requests: Tensor, valid: Tensor, tables: TableIds) -> AttentionMetadata:
        block_tables = BlockTables.of({group: self.table(n) for group, n in tables.items()})
        return build_metadata(
            positions=positions,
            token_to_req=requests,
            is_valid_token=valid,
            block_tables=block_tables,
            window=self.window,
            max_model_len=self.max_model_len,
            ratios=tuple(block_tables.sources),
        )


def table_sets(layers: Iterable[TableIds]) -> tuple[list[dict[str, int]], list[int]]:
    """Return the fewest sets of block tables with one table for every group, and the set of each layer.

    A layer joins the first set that contradicts none of its tables: layers of all kinds that share a window table share
    a set.
    """
    sets: list[dict[str, int]] = []
    chosen = []
    for tables in layers:
        fits = (i for i, held in enumerate(sets) if all(held.get(group, n) == n for group, n in tables.items()))
        number = next(fits, len(sets))
        if number == len(sets):
            sets.append({})
        sets[number] |= tables
        chosen.append(number)
    return sets, chosen
