from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch.utils import _pytree as pytree

from dsv4_compile.metadata import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata


def filled(cls: type, **given: object) -> object:
    """Return an instance with different tensors in all fields."""
    return cls(**{f.name: torch.tensor([i]) for i, f in enumerate(fields(cls))} | given)


def nested(c128: object = None) -> AttentionMetadata:
    return filled(AttentionMetadata, window=filled(WindowMetadata), c4=filled(CompressedMetadata), c128=c128)


@pytest.mark.parametrize("cls", [BlockTables, WindowMetadata, CompressedMetadata])
def test_every_field_is_a_leaf_that_nothing_replaces(cls: type) -> None:
    value = filled(cls)
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == [getattr(value, f.name) for f in fields(cls)]
    assert pytree.tree_unflatten(leaves, spec) == value
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(cls)[0].name, None)


def test_metadata_prints_shapes_and_no_values() -> None:
    text = repr(AttentionMetadata(torch.arange(48), *torch.zeros(2, 48), WindowMetadata(*torch.zeros(3, 48, 2).int())))
    assert text == (
        "AttentionMetadata(positions=int64[48], token_to_req=float32[48], is_valid_token=float32[48], "
        "window=WindowMetadata(slot_mapping=int32[48, 2], indices=int32[48, 2], lens=int32[48, 2]))"
    )


def test_metadata_is_mapped_as_a_tree_and_absent_parts_stay_absent() -> None:
    moved = pytree.tree_map(lambda x: x + 1, nested())
    assert isinstance(moved, AttentionMetadata)
    assert moved.c128 is None
    assert moved.window.lens == nested().window.lens + 1
    assert moved.c4.indexer_state_block_table == nested().c4.indexer_state_block_table + 1


def test_metadata_goes_into_a_compiled_function_and_comes_out() -> None:
    def step(metadata: AttentionMetadata) -> AttentionMetadata:
        window = metadata.window
        shifted = WindowMetadata(window.slot_mapping + 1, window.indices, window.lens * 2)
        return AttentionMetadata(
            metadata.positions + 1, metadata.token_to_req, metadata.is_valid_token, shifted, metadata.c4
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert pytree.tree_leaves(compiled(nested())) == pytree.tree_leaves(step(nested()))


def test_metadata_can_be_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, metadata: AttentionMetadata) -> torch.Tensor:
            return metadata.positions + metadata.window.lens

    program = torch.export.export(Module(), (nested(),))
    assert program.module()(nested()) == Module()(nested())
