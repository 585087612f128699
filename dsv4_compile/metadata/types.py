"""What attention needs to know about a batch, as tensors: pytrees that cross `torch.compile` and `torch.export`.

Nothing here is a Python number that changes from step to step, so a new batch is new data and never a new graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor
from torch.export import register_dataclass


class _Described:
    """Prints as the dtype and shape of each tensor it holds: the tensors themselves would fill pages."""

    def __repr__(self) -> str:
        held = ((field.name, getattr(self, field.name)) for field in fields(cast(Any, self)))
        texts = [f"{name}={_text(value)}" for name, value in held if value is not None]
        return f"{type(self).__name__}({', '.join(texts)})"


def _text(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, repr=False)
class BlockTables(_Described):
    """Block tables int32 `[R, B]`, one per kind of cache; None where no layer of the model has that cache.

    Row r lists the pages of request r in order of position. An entry covers `layout.WINDOW_BLOCK` tokens in `window`,
    `layout.KV_BLOCK` tokens in `c4`, `indexer` and `c128`, and `layout.state_block_size(ratio)` tokens in the states.
    Entries of -1, and columns a request has not reached, are never followed.
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
    """The sliding window, for every layer.

    slot_mapping: int64 `[T]`, where a token's KV is written; -1 = nowhere.
    indices: int32 `[T, W]`, slots of the last W tokens up to the token itself, ascending by position, -1 tail.
    lens: int32 `[T]`, how many columns count; 0 for padding.
    """

    slot_mapping: Tensor
    indices: Tensor
    lens: Tensor


@dataclass(frozen=True, repr=False)
class CompressedMetadata(_Described):
    """Compressed entries, for the layers of one compress ratio.

    slot_mapping: int64 `[T]`, where the entry that a token completes is written; -1 for all other tokens.
    block_table: int32 `[R, B]` of the entries.
    state_slot_mapping: int64 `[T]`, where a token's compressor state is written; -1 = nowhere.
    state_block_table: int32 `[R, B]` of the states.
    context_lens: int32 `[T]`, entries a token may see, `(position + 1) // ratio`; 0 for padding.
    indices: int32 `[T, C]`, lens: int32 `[T]`: slots of all visible entries in order, -1 tail, and how many columns
        count. Ratio 128 only: at ratio 4 the indexer chooses.
    indexer_*: as the fields without the prefix, for the indexer's own cache. Ratio 4 only.
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
    """One step's batch of T tokens, decodes and prefills alike.

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
