from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.convert_req_index import convert_req_index
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from dsv4_compile.testing.batch import index, random_table, row, table_tensor


def i32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_positions_are_kept_and_valid_slots_counted() -> None:
    slots, counts = convert_req_index(i32([0, 1]), i32([[3, 8], [1, -1]]), i32([[0, -1, 70], [5, 64, 128]]), 64)
    assert_bitwise(slots, i32([[192, -1, 518], [69, -1, -1]]))
    assert_bitwise(counts, i32([2, 1]))


def test_compact_moves_valid_slots_to_the_front_in_order() -> None:
    slots, counts = convert_req_index(i32([0]), i32([[3, 8]]), i32([[-1, 70, 500, 1, -1, 0]]), 64, True)
    assert_bitwise(slots, i32([[518, 193, 192, -1, -1, -1]]))
    assert_bitwise(counts, i32([3]))


@pytest.mark.parametrize("hostile", [False, True])
def test_every_index_of_random_batches(hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        rows, tokens, width, block_size = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 12), rng.choice((4, 64))
        table = random_table(rng, rows, 3, hostile=hostile)
        local = hostile_indices((tokens, width), 3 * block_size, fraction=0.4 if hostile else 0.0)
        requests = hostile_indices((tokens + rng.choice((0, 2)),), rows, fraction=0.2 if hostile else 0.0)
        expected = [
            [index(table, request, i, block_size) for i in indices]
            for request, indices in zip(requests.tolist(), local.tolist(), strict=False)
        ]
        valid = [[s for s in slots if s >= 0] for slots in expected]
        for compact in (False, True):
            slots, counts = convert_req_index(requests, table_tensor(table), local, block_size, compact)
            assert slots.tolist() == ([row(r, width) for r in valid] if compact else expected)
            assert counts.tolist() == [len(r) for r in valid]


@given(
    indices=st.lists(st.integers(-1, 60), min_size=1, max_size=12),
    holes=st.lists(st.integers(0, 12), max_size=5),
)
def test_padding_never_changes_what_compaction_gives(indices: list[int], holes: list[int]) -> None:
    """-1 entries anywhere in a row leave its valid slots, their order and their number as they were."""
    sparse = list(indices)
    for hole in holes:
        sparse.insert(hole, -1)
    table = i32([[9, 4, 2]])
    slots, counts = convert_req_index(i32([0]), table, i32([indices]), 16, True)
    wide_slots, wide_counts = convert_req_index(i32([0]), table, i32([sparse]), 16, True)
    assert wide_slots[0].tolist() == row(slots[0].tolist(), len(sparse))
    assert torch.equal(counts, wide_counts)


def samples() -> list[tuple]:
    requests, table, local = hostile_indices((5,), 2), i32([[5, 2, 7], [1, 0, 3]]), hostile_indices((5, 8), 192)
    return [
        (requests, table, local, 64),
        (strided(requests), strided(table), strided(local), 64, True),
        (padded(requests.long()), padded(table), padded(local.long()), 64, True),
        (requests[:0], table, local[:0], 64, True),
        (requests[:1], table, local[:1, :0], 64, True),
        (requests[:1], table[:0], local[:1], 64),
        (requests[:1], table[:, :0], torch.full((1, 3), -1, dtype=torch.int32), 64, True),
    ]


def test_op_contract() -> None:
    check_op(convert_req_index, samples())


def test_compiles_once_for_every_token_count() -> None:
    table = i32([[5, 2, 7], [1, 0, 3]])

    def step(requests: Tensor, local: Tensor) -> list[Tensor]:
        full, compact = (convert_req_index(requests, table, local, 64, flag) for flag in (False, True))
        return [x * 2 for x in (*full, *compact)]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 8, 33):
            args = hostile_indices((tokens,), 2), hostile_indices((tokens, 16), 192)
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(1, dtype=torch.int32), "req_id has a row for every token"),
        (0, torch.zeros(2), r"req_id \[N\]"),
        (1, torch.zeros(4, dtype=torch.int32), r"block_table \[R, B\]"),
        (2, torch.zeros(2, 1, 4, dtype=torch.int32), r"token_indices \[T, K\]"),
        (3, 0, "block_size is at least 1"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = [i32([0, 0]), i32([[0]]), torch.zeros(2, 4, dtype=torch.int32), 64]
    args[position] = value
    with pytest.raises(InputError, match=message):
        convert_req_index(*args)
