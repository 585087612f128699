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
    "window": 64,
    "entries_4": 256,
    "states_4": 4,
    "keys_4": 256,
    "key_states_4": 4,
    "entries_128": 256,
    "states_128": 8,
}


class Model:
    """Block tables for R requests of up to `max_model_len` tokens, and the expected metadata of each token."""

    def __init__(self, rng: random.Random, requests: int, max_model_len: int, window: int, hostile: bool = False):
        columns = {name: layout.cdiv(max_model_len, tokens) for name, tokens in PAGE_TOKENS.items()}
        self.lists: dict[str, Table] = {
            name: random_table(rng, requests, count, hostile=hostile) for name, count in columns.items()
        }
        self.tables = BlockTables.of({name: table_tensor(table, columns[name]) for name, table in self.lists.items()})
        self.window, self.width = window, layout.c128a_width(max_model_len)
        self.max_model_len = max_model_len

    def token(self, request: int, position: int) -> dict[str, object]:
        """Return all values of one token by the path of their tensor; position -1 is padding."""
        row, owner = max(position, 0), request if position >= 0 else 0
        indices, lens = window_row(self.lists["window"], owner, position, self.window, layout.WINDOW_BLOCK)
        entries, count = entry_row(self.lists["entries_128"], owner, position, self.width, 2, 128)
        return {
            "positions": row,
            "token_to_req": owner,
            "is_valid_token": position >= 0,
            "window.slot_mapping": slot(self.lists["window"], owner, position, layout.WINDOW_BLOCK),
            "window.indices": indices,
            "window.lens": lens,
            "sources[4].slot_mapping": compressed_slot(self.lists["entries_4"], owner, position, 64, 4),
            "sources[4].state_slot_mapping": slot(self.lists["states_4"], owner, position, 4),
            "sources[4].context_lens": (position + 1) // 4,
            "sources[4].indexer_slot_mapping": compressed_slot(self.lists["keys_4"], owner, position, 64, 4),
            "sources[4].indexer_state_slot_mapping": slot(self.lists["key_states_4"], owner, position, 4),
            "sources[128].slot_mapping": compressed_slot(self.lists["entries_128"], owner, position, 2, 128),
            "sources[128].state_slot_mapping": slot(self.lists["states_128"], owner, position, 8),
            "sources[128].context_lens": (position + 1) // 128,
            "sources[128].indices": entries,
            "sources[128].lens": count,
        }


def _flatten(metadata: object, prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, Tensor):
            tensors[prefix + field.name] = value
        elif isinstance(value, dict):
            for key, held in value.items():
                tensors |= _flatten(held, f"{prefix}{field.name}[{key}].")
        elif value is not None:
            tensors |= _flatten(value, f"{prefix}{field.name}.")
    return tensors


INT64 = {"positions", "window.slot_mapping"}
INT64 |= {f"sources[{ratio}].{role}slot_mapping" for ratio in (4, 128) for role in ("", "state_")}
INT64 |= {"sources[4].indexer_slot_mapping", "sources[4].indexer_state_slot_mapping"}

TABLES = {
    "sources[4].block_table": "entries_4",
    "sources[4].state_block_table": "states_4",
    "sources[4].indexer_block_table": "keys_4",
    "sources[4].indexer_state_block_table": "key_states_4",
    "sources[128].block_table": "entries_128",
    "sources[128].state_block_table": "states_128",
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
            assert tensors[name] is model.tables.tensors()[table], name

    return compare


@pytest.fixture
def batch_model() -> type[Model]:
    """Return the class of the model; tests choose requests, lengths and window."""
    return Model
