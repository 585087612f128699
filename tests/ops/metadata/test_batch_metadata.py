from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.batch_metadata import ARGUMENTS, CONTEXT_LENS, GROUPS, TOKENS, batch_metadata
from dsv4_compile.testing import check_op, padded, strided
from dsv4_compile.testing.batch import (
    Batch,
    compressed_slot,
    entry_row,
    random_batch,
    random_table,
    slot,
    table_tensor,
    window_row,
)
from dsv4_compile.testing.samples import op_samples

STALE, WINDOW, MAX_LEN = 12345, 9, 700
PAGE_TOKENS = {"window": 64, "c4": 256, "c4_state": 4, "indexer": 256, "indexer_state": 4, "c128": 256, "c128_state": 8}
WIDTHS = {"window_indices": WINDOW, "c128_indices": layout.c128a_width(MAX_LEN)}
Tables = dict[str, list[list[int]]]


def tables_for(rng: random.Random, requests: int, *, hostile: bool = False) -> Tables:
    return {g: random_table(rng, requests, -(-MAX_LEN // n), hostile=hostile) for g, n in PAGE_TOKENS.items()}


def arguments(batch: Batch, tables: Tables, rows: int, slot_mapping: Tensor | None = None) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(ARGUMENTS)
    values |= {"query_start_loc": batch.query_start_loc(), "seq_lens": batch.seq_lens_tensor()}
    values |= {"slot_mapping": slot_mapping, "window_block_size": 64}
    values |= {f"{g}_block_table": table_tensor(t, -(-MAX_LEN // PAGE_TOKENS[g])) for g, t in tables.items()}
    dtypes = TOKENS | {name: dtype for group in tables for name, dtype in GROUPS[group].items()}
    dtypes |= dict.fromkeys(CONTEXT_LENS, torch.int32)
    for name, dtype in dtypes.items():
        shape = (rows, WIDTHS[name]) if name in WIDTHS else (rows,)
        values[name] = torch.full(shape, 1 if dtype is torch.bool else STALE, dtype=dtype)
    return values


def run(*args: Any, **kwargs: Any) -> dict[str, list]:
    values = arguments(*args, **kwargs)
    batch_metadata(*values.values())
    outputs = ARGUMENTS[ARGUMENTS.index("positions") :]
    return {name: values[name].tolist() for name in outputs if values[name] is not None}


def expected(tokens: list[tuple[int, int]], tables: Tables, rows: int) -> dict[str, list]:
    """Every row of every buffer, from lists."""
    tokens = tokens + [(-1, -1)] * (rows - len(tokens))
    columns: dict[str, list] = {name: [] for name in TOKENS} | {n: [] for group in tables for n in GROUPS[group]}
    columns |= {name: [] for name in CONTEXT_LENS}

    def put(group: str, **values: Any) -> None:
        for name, value in values.items():
            if group in tables:
                columns[name].append(value)

    for request, position in tokens:
        r = request if position >= 0 else 0
        columns["positions"].append(max(position, 0))
        columns["token_to_req"].append(r)
        columns["is_valid_token"].append(position >= 0)
        t = {group: tables.get(group, []) for group in PAGE_TOKENS}
        row, count = window_row(t["window"], r, position, WINDOW, 64)
        put("window", window_slots=slot(t["window"], r, position, 64), window_indices=row, window_lens=count)
        put("c4", c4_slots=compressed_slot(t["c4"], r, position, 64, 4))
        put("c4_state", c4_state_slots=slot(t["c4_state"], r, position, 4))
        put("indexer", indexer_slots=compressed_slot(t["indexer"], r, position, 64, 4))
        put("indexer_state", indexer_state_slots=slot(t["indexer_state"], r, position, 4))
        row, count = entry_row(t["c128"], r, position, WIDTHS["c128_indices"], 2, 128)
        put("c128", c128_slots=compressed_slot(t["c128"], r, position, 2, 128), c128_indices=row, c128_lens=count)
        columns["c4_context_lens"].append((position + 1) // 4)
        columns["c128_context_lens"].append((position + 1) // 128)
        put("c128_state", c128_state_slots=slot(t["c128_state"], r, position, 8))
    return columns


def test_a_decode_at_both_boundaries_and_a_row_of_padding() -> None:
    tables = {"window": [[3, 5]], "c4": [[7]], "c128": [[9]], "c128_state": [[*range(20, 36)]]}
    metadata = run(Batch((1,), (128,)), tables, 2)
    assert metadata["positions"] == [127, 0]
    assert metadata["window_slots"] == [5 * 64 + 63, -1]
    assert metadata["window_indices"] == [[*range(375, 384)], [-1] * WINDOW]
    assert metadata["c4_slots"] == [7 * 64 + 31, -1]
    assert metadata["c4_context_lens"] == [32, 0]
    assert metadata["c128_slots"] == [18, -1]
    assert metadata["c128_indices"] == [[18] + [-1] * 127, [-1] * 128]
    assert metadata["c128_lens"] == [1, 0]
    assert metadata["c128_state_slots"] == [35 * 8 + 7, -1]


@pytest.mark.parametrize("hostile", [False, True])
def test_every_row_of_random_batches(hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        batch = random_batch(rng, max_seq_len=MAX_LEN)
        tables = tables_for(rng, len(batch.seq_lens), hostile=hostile)
        rows = batch.num_tokens + rng.choice((0, 1, 7))
        assert run(batch, tables, rows) == expected(batch.tokens(), tables, rows)


@pytest.mark.parametrize("groups", [("window",), ("c4", "c128_state"), ()])
def test_only_the_groups_that_are_given_are_filled(groups: tuple[str, ...], seed: int) -> None:
    batch = Batch((2, 3), (9, 3), padding=1)
    tables = {g: t for g, t in tables_for(random.Random(seed), 2).items() if g in groups}
    assert run(batch, tables, 8) == expected(batch.tokens(), tables, 8)


def test_tokens_without_a_slot_of_the_engine_are_padding(seed: int) -> None:
    batch = Batch((2, 3), (9, 3), padding=1)
    tables = tables_for(random.Random(seed), 2)
    tokens = [token if i not in (1, 4, 5) else (-1, -1) for i, token in enumerate(batch.tokens())]
    engine = torch.tensor([5, -1, 0, 2**40, -7])
    assert run(batch, tables, 8, engine) == expected(tokens, tables, 8)
    assert run(batch, tables, 8, engine[:0]) == expected([], tables, 8)


def test_fewer_rows_than_tokens_are_filled_alike(seed: int) -> None:
    batch = Batch((2, 30), (9, 300))
    tables = tables_for(random.Random(seed), 2)
    assert run(batch, tables, 5) == expected(batch.tokens()[:5], tables, 5)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_requests_and_no_rows(rows: int) -> None:
    tables: Tables = {group: [] for group in PAGE_TOKENS}
    assert run(Batch((), ()), tables, rows) == expected([], tables, rows)


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_and_wide_integers_change_nothing(spread: Callable[[Tensor], Tensor], seed: int) -> None:
    batch = Batch((1, 2, 200), (128, 9, 300), padding=2)
    tables = tables_for(random.Random(seed), 3)
    values = arguments(batch, tables, 206, batch.slot_mapping().int())
    values = {name: spread(x) if isinstance(x, Tensor) else x for name, x in values.items()}
    values |= {name: values[name].long() for name in ("query_start_loc", "seq_lens", "c4_block_table")}
    batch_metadata(*values.values())
    for name, rows in expected(batch.tokens(), tables, 206).items():
        assert values[name].tolist() == rows, name


def test_promises() -> None:
    check_op(batch_metadata, op_samples("batch_metadata")[1:])


def test_one_graph_for_every_number_of_tokens(seed: int) -> None:
    rng = random.Random(seed)
    compiled = torch.compile(batch_metadata, backend="aot_eager", fullgraph=True, dynamic=True)
    tables = tables_for(rng, 3)
    with torch.compiler.set_stance("default"):
        compiled(*arguments(Batch((2, 2, 3), (9, 128, 3)), tables, 10).values())
    for query, rows in (((1, 1, 1), 4), ((3, 200, 5), 220)):
        batch = Batch(query, (130, 400, 256))
        values = arguments(batch, tables, rows)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(*values.values())
        for name, row in expected(batch.tokens(), tables, rows).items():
            assert values[name].tolist() == row, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_lens": None}, "window_slots, window_indices, window_block_table alone"),
        ({"c4_context_lens": torch.zeros(3, dtype=torch.int32)}, "c4_context_lens has a row for each"),
        ({"c4_block_table": None}, "c4_slots alone"),
        ({"c128_slots": torch.zeros(3, dtype=torch.int64)}, "c128_slots has a row for each of positions"),
        ({"c128_indices": torch.zeros(4, dtype=torch.int32)}, r"c128_indices \[N, C\] is int32"),
        ({"window_slots": torch.zeros(4, dtype=torch.int32)}, r"window_slots \[N\] is int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "query_start_loc has one element more"),
        ({"positions": torch.tensor(4)}, r"positions \[N\] is int64"),
        ({"window_block_size": 0}, "window_block_size is at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str, seed: int) -> None:
    values = arguments(Batch((2, 2), (9, 128)), tables_for(random.Random(seed), 2), 4) | change
    with pytest.raises(InputError, match=message):
        batch_metadata(*values.values())
