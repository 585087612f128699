"""Metadata of a batch as dataclasses of tensors, registered as pytrees for `torch.compile` and `torch.export`.

They hold no Python numbers that change between steps, so a new batch never recompiles a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor
from torch.export import register_dataclass


class _Described:
    """Base with a `repr` of dtypes and shapes instead of tensor values."""

    def __repr__(self) -> str:
        held = ((field.name, getattr(self, field.name)) for field in fields(cast(Any, self)))
        texts = [f"{name}={_text(value)}" for name, value in held if value is not None]
        return f"{type(self).__name__}({', '.join(texts)})"


def _text(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, repr=False)
class BlockTables(_Described):
    """Block tables int32 `[R, B]`, one per group of caches; None for groups that the model does not have.

    Row r lists the pages of request r in order of position. An entry covers `layout.WINDOW_BLOCK` tokens in `window`,
    `layout.KV_BLOCK` tokens in `c4`, `indexer` and `c128`, and `layout.state_block_size(ratio)` tokens in the states.
    Entries of -1, and columns after the end of a request, are never read.
    """

    window: Tensor
    c4: Tensor | None = None
    c4_state: Tensor | None = None
    indexer: Tensor | None = None
    indexer_state: Tensor | None = None
    c128: Tensor | None = None
    c128_state: Tensor | None = None


@dataclass(frozen=True, repr=False)
class WindowMetadata(_Described):
    """Metadata of the sliding window, for every layer.

    slot_mapping: int64 `[T]`, slot that a token's KV is written to; -1 = none.
    indices: int32 `[T, W]`, slots of the last W tokens including the token itself, ascending by position, then -1.
    lens: int32 `[T]`, number of valid columns; 0 for padding.
    """

    slot_mapping: Tensor
    indices: Tensor
    lens: Tensor


@dataclass(frozen=True, repr=False)
class CompressedMetadata(_Described):
    """Metadata of compressed entries, for the layers of one compress ratio.

    slot_mapping: int64 `[T]`, slot of the entry that a token completes; -1 for all other tokens.
    block_table: int32 `[R, B]` of the entries.
    state_slot_mapping: int64 `[T]`, slot of a token's compressor state; -1 = none.
    state_block_table: int32 `[R, B]` of the states.
    context_lens: int32 `[T]`, entries that a token may attend, `(position + 1) // ratio`; 0 for padding.
    indices: int32 `[T, C]`, lens: int32 `[T]`: slots of all visible entries in order, then -1, and the number of
        valid columns. Ratio 128 only: at ratio 4 the indexer selects.
    indexer_*: the same as the fields without the prefix, for the indexer's cache. Ratio 4 only.
    """

    slot_mapping: Tensor
    block_table: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    context_lens: Tensor
    indices: Tensor | None = None
    lens: Tensor | None = None
    indexer_slot_mapping: Tensor | None = None
    indexer_block_table: Tensor | None = None
    indexer_state_slot_mapping: Tensor | None = None
    indexer_state_block_table: Tensor | None = None


@dataclass(frozen=True, repr=False)
class AttentionMetadata(_Described):
    """Metadata of one step's batch of T tokens, decodes and prefills.

    positions: int64 `[T]` within the request; 0 for padding, a legal row of any RoPE table.
    token_to_req: int32 `[T]`, row of the block tables; 0 for padding, a legal row.
    is_valid_token: bool `[T]`; False for padding. Padding has no slots, no indices and length 0 everywhere.
    """

    positions: Tensor
    token_to_req: Tensor
    is_valid_token: Tensor
    window: WindowMetadata
    c4: CompressedMetadata | None = None
    c128: CompressedMetadata | None = None


for _cls in (BlockTables, WindowMetadata, CompressedMetadata, AttentionMetadata):
    register_dataclass(_cls)


def metadata_of(rows: Mapping[str, Tensor], tables: BlockTables) -> AttentionMetadata:
    """Return metadata made of buffers, by their names in `buffers.BUFFERS`, and the block tables of the same groups."""
    c4, c128 = None, None
    if tables.c4 is not None and tables.c4_state is not None:
        c4 = CompressedMetadata(
            slot_mapping=rows["c4_slots"],
            block_table=tables.c4,
            state_slot_mapping=rows["c4_state_slots"],
            state_block_table=tables.c4_state,
            context_lens=rows["c4_context_lens"],
            indexer_slot_mapping=rows["indexer_slots"],
            indexer_block_table=tables.indexer,
            indexer_state_slot_mapping=rows["indexer_state_slots"],
            indexer_state_block_table=tables.indexer_state,
        )
    if tables.c128 is not None and tables.c128_state is not None:
        c128 = CompressedMetadata(
            slot_mapping=rows["c128_slots"],
            block_table=tables.c128,
            state_slot_mapping=rows["c128_state_slots"],
            state_block_table=tables.c128_state,
            context_lens=rows["c128_context_lens"],
            indices=rows["c128_indices"],
            lens=rows["c128_lens"],
        )
    return AttentionMetadata(
        positions=rows["positions"],
        token_to_req=rows["token_to_req"],
        is_valid_token=rows["is_valid_token"],
        window=WindowMetadata(rows["window_slots"], rows["window_indices"], rows["window_lens"]),
        c4=c4,
        c128=c128,
    )
