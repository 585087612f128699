"""Metadata of a batch as dataclasses of tensors, registered as pytrees for `torch.compile` and `torch.export`.

They hold no Python numbers that change between steps, so a new batch never recompiles a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from torch import Tensor
from torch.export import register_dataclass

from ..errors import fail
from ..sources import Group


class _Described:
    """Base with a `repr` of dtypes and shapes instead of tensor values."""

    def __repr__(self) -> str:
        held = ((field.name, getattr(self, field.name)) for field in fields(cast(Any, self)))
        texts = [f"{name}={_text(value)}" for name, value in held if value is not None]
        return f"{type(self).__name__}({', '.join(texts)})"


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(held)}' for key, held in value.items())}}}"
    return repr(value)


@dataclass(frozen=True, repr=False)
class SourceTables(_Described):
    """Block tables int32 `[R, B]` of the sources of one compress ratio; None for caches that they do not have.

    Attributes:
        entries, states: of compressors. keys, key_states: of indexers.
    """

    entries: Tensor
    states: Tensor | None = None
    keys: Tensor | None = None
    key_states: Tensor | None = None


@dataclass(frozen=True, repr=False)
class BlockTables(_Described):
    """Block tables int32 `[R, B]`, one per group of caches; `sources` has those of each compress ratio.

    Row r lists the pages of request r in order of position. `sources.groups_of` has the tokens that an entry covers.
    Entries of -1, and columns after the end of a request, are never read.
    """

    window: Tensor
    sources: dict[int, SourceTables] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: Mapping[str, Tensor]) -> BlockTables:
        """Return the tables of groups, by their names. E201 for a ratio without a table of entries."""
        roles: dict[int, dict[str, Tensor]] = {}
        for name, table in tables.items():
            if name != "window":
                role, _, ratio = name.rpartition("_")
                roles.setdefault(int(ratio), {})[role] = table
        for number, held in roles.items():
            if "entries" not in held:
                fail("E201", got=f"{', '.join(held)} of ratio {number}", rule="a source has a block table of entries")
        return cls(tables["window"], {number: SourceTables(**held) for number, held in roles.items()})

    def get(self, group: Group) -> Tensor | None:
        """Return the table of a group, or None."""
        if group.role == "window":
            return self.window
        source = self.sources.get(group.ratio)
        return None if source is None else getattr(source, group.role)

    def table(self, group: Group) -> Tensor:
        """Return the table of a group. E201 if there is none."""
        table = self.get(group)
        if table is None:
            fail("E201", got=f"no block table of {group.name}", rule="every group of the layers has a block table")
        return table

    def of_ratios(self, ratios: Collection[int]) -> BlockTables:
        """Return the tables of layers of these ratios."""
        return BlockTables(self.window, {ratio: x for ratio, x in self.sources.items() if ratio in ratios})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tables by the names of their groups."""
        named = {f"{role}_{r}": x for r, source in self.sources.items() for role, x in vars(source).items()}
        return {name: table for name, table in {"window": self.window, **named}.items() if table is not None}


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
    """Metadata of compressed entries, for the layers with a source of one compress ratio.

    slot_mapping: int64 `[T]`, slot of the entry that a token completes; -1 for all other tokens.
    block_table: int32 `[R, B]` of the entries.
    context_lens: int32 `[T]`, entries that a token may attend, `(position + 1) // ratio`; 0 for padding.
    state_slot_mapping: int64 `[T]`, slot of a token's compressor state; -1 = none.
    state_block_table: int32 `[R, B]` of the states.
    indices: int32 `[T, C]`, lens: int32 `[T]`: slots of all visible entries in order, then -1, and the number of
        valid columns. None where an indexer selects.
    indexer_*: the same as the fields without the prefix, for the indexer's cache. None without an indexer.
    """

    slot_mapping: Tensor
    block_table: Tensor
    context_lens: Tensor
    state_slot_mapping: Tensor | None = None
    state_block_table: Tensor | None = None
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
    sources: metadata of compressed entries by compress ratio.
    """

    positions: Tensor
    token_to_req: Tensor
    is_valid_token: Tensor
    window: WindowMetadata
    sources: dict[int, CompressedMetadata] = field(default_factory=dict)


for _cls in (SourceTables, BlockTables, WindowMetadata, CompressedMetadata, AttentionMetadata):
    register_dataclass(_cls)


def source_metadata(ratio: int, tables: SourceTables, rows: Mapping[str, Tensor]) -> CompressedMetadata:
    """Return the metadata of a ratio from rows by their names in `buffers.BUFFERS`."""
    entries = f"entries_{ratio}"
    return CompressedMetadata(
        slot_mapping=rows[f"{entries}_slots"],
        block_table=tables.entries,
        context_lens=rows[f"{entries}_context_lens"],
        state_slot_mapping=rows.get(f"states_{ratio}_slots"),
        state_block_table=tables.states,
        indices=rows.get(f"{entries}_indices"),
        lens=rows.get(f"{entries}_lens"),
        indexer_slot_mapping=rows.get(f"keys_{ratio}_slots"),
        indexer_block_table=tables.keys,
        indexer_state_slot_mapping=rows.get(f"key_states_{ratio}_slots"),
        indexer_state_block_table=tables.key_states,
    )


def metadata_of(rows: Mapping[str, Tensor], tables: BlockTables) -> AttentionMetadata:
    """Return metadata made of rows, by their names in `buffers.BUFFERS`, and the block tables of the same groups."""
    return AttentionMetadata(
        positions=rows["positions"],
        token_to_req=rows["token_to_req"],
        is_valid_token=rows["is_valid_token"],
        window=WindowMetadata(rows["window_slots"], rows["window_indices"], rows["window_lens"]),
        sources={ratio: source_metadata(ratio, source, rows) for ratio, source in tables.sources.items()},
    )
