from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch.utils import _pytree as pytree

from dsv4_compile.errors import InputError
from dsv4_compile.metadata import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata


def filled(cls: type, **given: object) -> object:
    """Return an instance with different tensors in all fields."""
    return cls(**{f.name: torch.tensor([i]) for i, f in enumerate(fields(cls))} | given)


def nested() -> AttentionMetadata:
    return filled(AttentionMetadata, window=filled(WindowMetadata), sources={4: filled(CompressedMetadata)})


@pytest.mark.parametrize("cls", [WindowMetadata, CompressedMetadata])
def test_every_field_is_a_leaf_that_nothing_replaces(cls: type) -> None:
    value = filled(cls)
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == [getattr(value, f.name) for f in fields(cls)]
    assert pytree.tree_unflatten(leaves, spec) == value
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(cls)[0].name, None)


def test_block_tables_are_a_tree_and_have_the_names_of_their_groups() -> None:
    named = {name: torch.tensor([[i]]) for i, name in enumerate(("window", "entries_4", "keys_4", "entries_2"))}
    tables = BlockTables.of(named)
    assert pytree.tree_leaves(tables) == [*named.values()]
    assert tables.tensors() == named
    moved = pytree.tree_map(lambda x: x + 1, tables)
    assert moved.sources[4].keys == 3 and moved.sources[4].states is None
    assert "sources={4: SourceTables(entries=int64[1, 1], keys=int64[1, 1]), 2: Source" in repr(tables)
    with pytest.raises(InputError, match=r"(?s)E201.*states of ratio 4"):
        BlockTables.of({"window": named["window"], "states_4": named["keys_4"]})


def test_metadata_prints_shapes_and_no_values() -> None:
    text = repr(AttentionMetadata(torch.arange(48), *torch.zeros(2, 48), WindowMetadata(*torch.zeros(3, 48, 2).int())))
    assert text == (
        "AttentionMetadata(positions=int64[48], token_to_req=float32[48], is_valid_token=float32[48], "
        "window=WindowMetadata(slot_mapping=int32[48, 2], indices=int32[48, 2], lens=int32[48, 2]), sources={})"
    )


def test_metadata_is_mapped_as_a_tree_and_absent_parts_stay_absent() -> None:
    moved = pytree.tree_map(lambda x: x + 1, nested())
    assert isinstance(moved, AttentionMetadata)
    assert list(moved.sources) == [4]
    assert moved.window.lens == nested().window.lens + 1
    assert moved.sources[4].indexer_state_block_table == nested().sources[4].indexer_state_block_table + 1


def test_metadata_goes_into_a_compiled_function_and_comes_out() -> None:
    def step(metadata: AttentionMetadata) -> AttentionMetadata:
        window = metadata.window
        shifted = WindowMetadata(window.slot_mapping + 1, window.indices, window.lens * 2)
        return AttentionMetadata(
            metadata.positions + 1, metadata.token_to_req, metadata.is_valid_token, shifted, metadata.sources
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert pytree.tree_leaves(compiled(nested())) == pytree.tree_leaves(step(nested()))


def test_metadata_can_be_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, metadata: AttentionMetadata) -> torch.Tensor:
            return metadata.positions + metadata.window.lens

    program = torch.export.export(Module(), (nested(),))
    assert program.module()(nested()) == Module()(nested())
