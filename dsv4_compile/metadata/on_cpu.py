"""Metadata of tokens as one op, for graphs on a CPU: what `build` derives, with few calls of torch.

As C++ its index arithmetic is most of the code of a decode step, and most of the time that a graph takes to compile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpu.metadata.slots import listed_slots, token_slots
from ..layout import CSA_RATIO, HCA_RATIO, c128a_width, state_block_size, storage_block_size
from .types import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata

_LIBRARY = torch.library.Library("dsv4_metadata", "DEF")
_LIBRARY.define(
    "build(Tensor positions, Tensor requests, Tensor?[] tables, int[] ratios, int[] block_sizes, int window, "
    "int max_entries) -> Tensor[]"
)


class _Group(NamedTuple):
    """Block table of one group of caches, one row for `ratio` tokens, in pages of `block_size` rows."""

    table: str
    ratio: int
    block_size: int


def _groups(ratios: Collection[int], window_block_size: int) -> list[_Group]:
    """Return the groups that tokens have a slot in, in the order of the op's results."""
    groups = [_Group("window", 1, window_block_size)]
    if CSA_RATIO in ratios:
        block, state = storage_block_size(CSA_RATIO), state_block_size(CSA_RATIO)
        groups += [_Group("c4", CSA_RATIO, block), _Group("c4_state", 1, state)]
        groups += [_Group("indexer", CSA_RATIO, block), _Group("indexer_state", 1, state)]
    if HCA_RATIO in ratios:
        groups.append(_Group("c128", HCA_RATIO, storage_block_size(HCA_RATIO)))
        groups.append(_Group("c128_state", 1, state_block_size(HCA_RATIO)))
    return groups


def build_on_cpu(
    positions: Tensor,
    requests: Tensor,
    block_tables: BlockTables,
    window: int,
    max_model_len: int,
    ratios: Collection[int],
    window_block_size: int,
) -> AttentionMetadata:
    """Return the metadata of `build` from its arguments; requests are rows of the block tables."""
    groups = _groups(ratios, window_block_size)
    width = c128a_width(max_model_len) if HCA_RATIO in ratios else 0
    outputs = torch.ops.dsv4_metadata.build(
        positions,
        requests,
        [getattr(block_tables, group.table) for group in groups],
        [group.ratio for group in groups],
        [group.block_size for group in groups],
        window,
        width,
    )
    slots, valid, places, owners, indices, lens, *rest = outputs
    slot = dict(zip((group.table for group in groups), slots.unbind(0), strict=True))
    c4 = c128 = None
    if CSA_RATIO in ratios:
        c4 = CompressedMetadata(
            slot_mapping=slot["c4"],
            block_table=_given(block_tables.c4),
            state_slot_mapping=slot["c4_state"],
            state_block_table=_given(block_tables.c4_state),
            context_lens=rest[0],
            indexer_slot_mapping=slot["indexer"],
            indexer_block_table=block_tables.indexer,
            indexer_state_slot_mapping=slot["indexer_state"],
            indexer_state_block_table=block_tables.indexer_state,
        )
    if HCA_RATIO in ratios:
        c128 = CompressedMetadata(
            slot_mapping=slot["c128"],
            block_table=_given(block_tables.c128),
            state_slot_mapping=slot["c128_state"],
            state_block_table=_given(block_tables.c128_state),
            context_lens=rest[-3],
            indices=rest[-2],
            lens=rest[-1],
        )
    return AttentionMetadata(places, owners, valid, WindowMetadata(slot["window"], indices, lens), c4, c128)


def _given(table: Tensor | None) -> Tensor:
    assert table is not None
    return table


def _run(
    positions: Tensor,
    requests: Tensor,
    tables: Sequence[Tensor],
    ratios: Sequence[int],
    block_sizes: Sequence[int],
    window: int,
    max_entries: int,
) -> list[Tensor]:
    """Return slots int64 `[G, T]`, valid, positions, requests, window indices and lengths, then entries of each ratio:
    visible ones for ratio 4; visible ones, indices and lengths for ratio 128. See `types` for their contents."""
    valid = positions >= 0
    slots = token_slots(positions, requests, tables, ratios, block_sizes)
    lens = (positions + 1).clamp_(0, window)
    indices = listed_slots(tables[0], requests, positions - lens + 1, lens, window, block_sizes[0])
    outputs = [slots, valid, positions.clamp_min(0), requests.to(torch.int32), indices, lens.to(torch.int32)]
    reached = (positions + 1).clamp_min_(0)
    if CSA_RATIO in ratios:
        outputs.append((reached // CSA_RATIO).to(torch.int32))
    if HCA_RATIO in ratios:
        group = list(ratios).index(HCA_RATIO)
        visible = reached // HCA_RATIO
        listed = visible.clamp_max(max_entries)
        rows = tables[group], requests, torch.zeros_like(listed), listed, max_entries, block_sizes[group]
        outputs += [visible.to(torch.int32), listed_slots(*rows), listed.to(torch.int32)]
    return outputs


def _fake(
    positions: Tensor, requests: Tensor, tables: Any, ratios: Any, block_sizes: Any, window: int, max_entries: int
) -> list[Tensor]:
    tokens = positions.shape[0]

    def new(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return positions.new_empty(shape, dtype=dtype)

    outputs = [new(len(tables), tokens, dtype=torch.int64), new(tokens, dtype=torch.bool)]
    outputs += [new(tokens, dtype=torch.int64), new(tokens), new(tokens, window), new(tokens)]
    if CSA_RATIO in ratios:
        outputs.append(new(tokens))
    if HCA_RATIO in ratios:
        outputs += [new(tokens), new(tokens, max_entries), new(tokens)]
    return outputs


_LIBRARY.impl("build", _run, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_metadata::build", _fake, lib=_LIBRARY)
