"""A model of a batch in dicts and lists: the expected metadata of each token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.metadata import AttentionMetadata, BlockTables
from dsv4_compile.testing.batch import Table, compressed_slot, entry_row, random_table, slot, table_tensor, window_row

PAGE_TOKENS = {
    "window": layout.WINDOW_BLOCK,
    "c4": layout.KV_BLOCK,
    "c4_state": layout.state_block_size(4),
    "indexer": layout.KV_BLOCK,
    "indexer_state": layout.state_block_size(4),
    "c128": layout.KV_BLOCK,
    "c128_state": layout.state_block_size(128),
}


class Model:
    """Block tables for R requests of up to `max_model_len` tokens, and the expected metadata of each token."""

    def __init__(self, rng: random.Random, requests: int, max_model_len: int, window: int, hostile: bool = False):
        columns = {name: layout.cdiv(max_model_len, tokens) for name, tokens in PAGE_TOKENS.items()}
        self.lists: dict[str, Table] = {
            name: random_table(rng, requests, count, hostile=hostile) for name, count in columns.items()
        }
        self.tables = BlockTables(**{name: table_tensor(table, columns[name]) for name, table in self.lists.items()})
        self.window, self.width = window, layout.c128a_width(max_model_len)
        self.max_model_len = max_model_len

    def token(self, request: int, position: int) -> dict[str, object]:
        """Return all values of one token by the path of their tensor; position -1 is padding."""
        row, owner = max(position, 0), request if position >= 0 else 0
        indices, lens = window_row(self.lists["window"], owner, position, self.window, layout.WINDOW_BLOCK)
        entries, count = entry_row(self.lists["c128"], owner, position, self.width, 2, 128)
        return {
            "positions": row,
            "token_to_req": owner,
            "is_valid_token": position >= 0,
            "window.slot_mapping": slot(self.lists["window"], owner, position, layout.WINDOW_BLOCK),
            "window.indices": indices,
            "window.lens": lens,
            "c4.slot_mapping": compressed_slot(self.lists["c4"], owner, position, 64, 4),
            "c4.state_slot_mapping": slot(self.lists["c4_state"], owner, position, 4),
            "c4.context_lens": (position + 1) // 4,
            "c4.indexer_slot_mapping": compressed_slot(self.lists["indexer"], owner, position, 64, 4),
            "c4.indexer_state_slot_mapping": slot(self.lists["indexer_state"], owner, position, 4),
            "c128.slot_mapping": compressed_slot(self.lists["c128"], owner, position, 2, 128),
            "c128.state_slot_mapping": slot(self.lists["c128_state"], owner, position, 8),
            "c128.context_lens": (position + 1) // 128,
            "c128.indices": entries,
            "c128.lens": count,
        }


def _flatten(metadata: object, prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, Tensor):
            tensors[prefix + field.name] = value
        elif value is not None:
            tensors |= _flatten(value, f"{prefix}{field.name}.")
    return tensors


INT64 = {"positions", *(f"{prefix}slot_mapping" for prefix in ("window.", "c4.", "c4.state_", "c128.", "c128.state_"))}
INT64 |= {"c4.indexer_slot_mapping", "c4.indexer_state_slot_mapping"}

TABLES = {
    "c4.block_table": "c4",
    "c4.state_block_table": "c4_state",
    "c4.indexer_block_table": "indexer",
    "c4.indexer_state_block_table": "indexer_state",
    "c128.block_table": "c128",
    "c128.state_block_table": "c128_state",
}


@pytest.fixture
def assert_describes() -> Callable[[AttentionMetadata, Model, list[tuple[int, int]]], None]:
    """Return a function that compares metadata with a model, for tokens given as (request, position)."""

    def compare(metadata: AttentionMetadata, model: Model, tokens: list[tuple[int, int]]) -> None:
        tensors = _flatten(metadata)
        expected = [model.token(*token) for token in tokens]
        names = set(model.token(0, -1))
        for name in names:
            dtype = torch.int64 if name in INT64 else torch.bool if name == "is_valid_token" else torch.int32
            assert tensors[name].dtype is dtype, name
            assert tensors[name].shape[0] == len(tokens), name
            assert tensors[name].tolist() == [values[name] for values in expected], name
        assert set(tensors) == names | set(TABLES)
        for name, table in TABLES.items():
            assert tensors[name] is getattr(model.tables, table), name

    return compare


@pytest.fixture
def batch_model() -> type[Model]:
    """Return the class of the model; tests choose requests, lengths and window."""
    return Model
