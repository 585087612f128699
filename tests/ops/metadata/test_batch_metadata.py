from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.metadata.buffers import buffers_of
from dsv4_compile.metadata.fill import arguments_of, names_of
from dsv4_compile.ops.metadata.batch_metadata import ARGUMENTS, batch_metadata
from dsv4_compile.sources import RATIOS, Group, groups_of
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
GROUPS = {group.name: group for group in groups_of()}
COLUMNS = {name: -(-MAX_LEN // group.page_tokens) for name, group in GROUPS.items()}
WIDTHS = {"window_indices": WINDOW, "entries_128_indices": layout.listed_width(128, MAX_LEN)}
Tables = dict[str, list[list[int]]]
Called = tuple[dict[str, Any], dict[str, Tensor]]


def tables_for(rng: random.Random, requests: int, *, hostile: bool = False) -> Tables:
    return {name: random_table(rng, requests, columns, hostile=hostile) for name, columns in COLUMNS.items()}


def buffers_for(groups: list[Group], rows: int) -> dict[str, Tensor]:
    """Every buffer of some groups by its declared name, full of old values."""
    specs = {spec.name: spec for spec in buffers_of(groups_of())}
    buffers = {}
    for name in names_of(groups, RATIOS):
        shape, dtype = (rows, WIDTHS[name]) if name in WIDTHS else (rows,), specs[name].dtype
        buffers[name] = torch.full(shape, 1 if dtype is torch.bool else STALE, dtype=dtype)
    return buffers


def called(batch: Batch, tables: Tables, rows: int, slot_mapping: Tensor | None = None) -> Called:
    """Arguments of a call by name, and the buffers that it fills."""
    held = {GROUPS[name]: table_tensor(table, COLUMNS[name]) for name, table in tables.items()}
    buffers = buffers_for([*held], rows)
    batch_of = batch.query_start_loc(), batch.seq_lens_tensor(), slot_mapping
    return dict(zip(ARGUMENTS, arguments_of(*batch_of, held, RATIOS, buffers), strict=True)), buffers


def run(*args: Any, **kwargs: Any) -> dict[str, list]:
    values, buffers = called(*args, **kwargs)
    batch_metadata(*values.values())
    return {name: buffer.tolist() for name, buffer in buffers.items()}


def expected(tokens: list[tuple[int, int]], tables: Tables, rows: int) -> dict[str, list]:
    """Every row of every buffer, from lists."""
    tokens = tokens + [(-1, -1)] * (rows - len(tokens))
    columns: dict[str, list] = {name: [] for name in buffers_for([GROUPS[name] for name in tables], 0)}

    def put(group: str, **values: Any) -> None:
        for name, value in values.items():
            if group in tables:
                columns[name].append(value)

    for request, position in tokens:
        r = request if position >= 0 else 0
        columns["positions"].append(max(position, 0))
        columns["token_to_req"].append(r)
        columns["is_valid_token"].append(position >= 0)
        t = {group: tables.get(group, []) for group in GROUPS}
        row, count = window_row(t["window"], r, position, WINDOW, 64)
        put("window", window_slots=slot(t["window"], r, position, 64), window_indices=row, window_lens=count)
        put("entries_4", entries_4_slots=compressed_slot(t["entries_4"], r, position, 64, 4))
        put("states_4", states_4_slots=slot(t["states_4"], r, position, 4))
        put("keys_4", keys_4_slots=compressed_slot(t["keys_4"], r, position, 64, 4))
        put("key_states_4", key_states_4_slots=slot(t["key_states_4"], r, position, 4))
        row, count = entry_row(t["entries_128"], r, position, WIDTHS["entries_128_indices"], 2, 128)
        put("entries_128", entries_128_slots=compressed_slot(t["entries_128"], r, position, 2, 128))
        put("entries_128", entries_128_indices=row, entries_128_lens=count)
        put("states_128", states_128_slots=slot(t["states_128"], r, position, 8))
        columns["entries_4_context_lens"].append((position + 1) // 4)
        columns["entries_128_context_lens"].append((position + 1) // 128)
    return columns


def test_a_decode_at_both_boundaries_and_a_row_of_padding() -> None:
    tables = {"window": [[3, 5]], "entries_4": [[7]], "entries_128": [[9]], "states_128": [[*range(20, 36)]]}
    metadata = run(Batch((1,), (128,)), tables, 2)
    assert metadata["positions"] == [127, 0]
    assert metadata["window_slots"] == [5 * 64 + 63, -1]
    assert metadata["window_indices"] == [[*range(375, 384)], [-1] * WINDOW]
    assert metadata["entries_4_slots"] == [7 * 64 + 31, -1]
    assert metadata["entries_4_context_lens"] == [32, 0]
    assert metadata["entries_128_slots"] == [18, -1]
    assert metadata["entries_128_indices"] == [[18] + [-1] * 127, [-1] * 128]
    assert metadata["entries_128_lens"] == [1, 0]
    assert metadata["states_128_slots"] == [35 * 8 + 7, -1]


@pytest.mark.parametrize("hostile", [False, True])
def test_every_row_of_random_batches(hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        batch = random_batch(rng, max_seq_len=MAX_LEN)
        tables = tables_for(rng, len(batch.seq_lens), hostile=hostile)
        rows = batch.num_tokens + rng.choice((0, 1, 7))
        assert run(batch, tables, rows) == expected(batch.tokens(), tables, rows)


@pytest.mark.parametrize("groups", [("window",), ("entries_4", "states_128"), ()])
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
    tables: Tables = {group: [] for group in GROUPS}
    assert run(Batch((), ()), tables, rows) == expected([], tables, rows)


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_and_wide_integers_change_nothing(spread: Callable[[Tensor], Tensor], seed: int) -> None:
    batch = Batch((1, 2, 200), (128, 9, 300), padding=2)
    tables = tables_for(random.Random(seed), 3)
    values, buffers = called(batch, tables, 206, batch.slot_mapping().int())
    spread_buffers = {name: spread(buffer) for name, buffer in buffers.items()}
    held = {GROUPS[name]: spread(table) for name, table in zip(tables, values["block_tables"], strict=True)}
    held[GROUPS["entries_4"]] = held[GROUPS["entries_4"]].long()
    batch_of = (spread(values[name]) for name in ("query_start_loc", "seq_lens", "slot_mapping"))
    starts, lens, engine = batch_of
    batch_metadata(*arguments_of(starts.long(), lens.long(), engine, held, RATIOS, spread_buffers))
    for name, rows in expected(batch.tokens(), tables, 206).items():
        assert spread_buffers[name].tolist() == rows, name


def test_promises() -> None:
    check_op(batch_metadata, op_samples("batch_metadata")[1:])


def test_one_graph_for_every_number_of_tokens(seed: int) -> None:
    rng = random.Random(seed)
    compiled = torch.compile(batch_metadata, backend="aot_eager", fullgraph=True, dynamic=True)
    tables = tables_for(rng, 3)
    with torch.compiler.set_stance("default"):
        compiled(*called(Batch((2, 2, 3), (9, 128, 3)), tables, 10)[0].values())
    for query, rows in (((1, 1, 1), 4), ((3, 200, 5), 220)):
        batch = Batch(query, (130, 400, 256))
        values, buffers = called(batch, tables, rows)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(*values.values())
        for name, row in expected(batch.tokens(), tables, rows).items():
            assert buffers[name].tolist() == row, name


def test_any_ratios_and_any_number_of_lists(seed: int) -> None:
    """Groups of ratios that no kernel has: every ratio of one model at once, two windows, two lists of entries."""
    rng, batch = random.Random(seed), Batch((1, 3, 20), (130, 9, 41), padding=2)
    tokens, rows = batch.tokens(), batch.num_tokens
    row_tokens, page_rows, listed, widths = [1, 1, 2, 3, 16], [8, 4, 32, 5, 2], [1, 0, 3, 4], [7, 3, 60, 2]
    tables = [random_table(rng, 3, 150) for _ in row_tokens]
    slots = [torch.full((rows,), STALE) for _ in row_tokens]
    indices = [torch.full((rows, width), STALE, dtype=torch.int32) for width in widths]
    lens, visible = ([torch.full((rows,), STALE, dtype=torch.int32) for _ in range(count)] for count in (4, 3))
    batch_metadata(
        batch.query_start_loc(), batch.seq_lens_tensor(), None, list(map(table_tensor, tables)), row_tokens, page_rows,
        torch.zeros(rows, dtype=torch.int64), torch.zeros(rows).int(), torch.zeros(rows).bool(), slots, listed, indices,
        lens, [1, 2, 3], visible,
    )  # fmt: skip
    for t, (request, position) in enumerate(tokens):
        r = max(request, 0)
        for table, ratio, size, got in zip(tables, row_tokens, page_rows, slots, strict=True):
            assert got[t] == compressed_slot(table, r, position, size, ratio)
        for place, width, row, count in zip(listed, widths, indices, lens, strict=True):
            size, ratio = page_rows[place], row_tokens[place]
            args = tables[place], r, position, width, size
            want = window_row(*args) if ratio == 1 else entry_row(*args, ratio)
            assert (row[t].tolist(), count[t]) == want
        assert [int(x[t]) for x in visible] == [(position + 1) // ratio for ratio in (1, 2, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lens": []}, "2 listed, 2 indices, 0 lens"),
        ({"ratios": [4]}, "1 ratios, 2 context_lens"),
        ({"context_lens": [torch.zeros(3, dtype=torch.int32)] * 2}, r"context_lens 0 \[N\] has a row for each"),
        ({"block_tables": []}, "0 block_tables, 7 row_tokens"),
        ({"block_tables": [torch.zeros(4, dtype=torch.int32)] * 7}, r"block_tables\[0\] \[R, B\]"),
        ({"slots": [torch.zeros(3, dtype=torch.int64)] * 7}, "slots 0 .* has a row for each of positions"),
        ({"indices": [torch.zeros(4, dtype=torch.int32)] * 2}, r"indices 0 \[N, C\] is int32"),
        ({"slots": [torch.zeros(4, dtype=torch.int32)] * 7}, r"slots 0 \[N\] is int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "query_start_loc has one element more"),
        ({"positions": torch.tensor(4)}, r"positions \[N\] is int64"),
        ({"page_rows": [0] * 7}, r"page_rows\[0\] is at least 1"),
        ({"ratios": [4, 0]}, r"ratios\[1\] is at least 1"),
        ({"listed": [0, 7]}, "listed has places in block_tables, of 7"),
        ({"positions": torch.zeros(4, dtype=torch.int64, device="meta")}, "all tensors of a call are on one device"),
        ({"slots": [torch.zeros(4, dtype=torch.int64, device="meta")] * 7}, "slots on meta"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str, seed: int) -> None:
    values, _ = called(Batch((2, 2), (9, 128)), tables_for(random.Random(seed), 2), 4)
    with pytest.raises(InputError, match=f"(?s){message}"):
        batch_metadata(*(values | change).values())
