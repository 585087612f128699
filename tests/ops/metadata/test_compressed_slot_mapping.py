from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.compressed_slot_mapping import compressed_slot_mapping
from dsv4_compile.testing import check_op, padded, strided
from dsv4_compile.testing.batch import Batch, compressed_slot, random_batch, random_table, table_tensor

SIZES = [(64, 4), (2, 128), (3, 5)]  # entries of a page, compress ratio


def arguments(batch: Batch, table: list[list[int]], block_size: int, ratio: int, capacity: int) -> tuple:
    out = torch.full((capacity,), 12345)
    table_and_sizes = (table_tensor(table, columns=3), block_size, ratio)
    return (batch.slot_mapping(), batch.query_start_loc(), batch.seq_lens_tensor(), *table_and_sizes, out)


def run(batch: Batch, table: list[list[int]], block_size: int, ratio: int, capacity: int | None = None) -> list[int]:
    args = arguments(batch, table, block_size, ratio, batch.num_tokens if capacity is None else capacity)
    compressed_slot_mapping(*args)
    return args[-1].tolist()


@pytest.mark.parametrize(("position", "slot"), [(0, -1), (1, -1), (2, -1), (3, 320), (255, 383), (259, 128)])
def test_ratio_4_writes_at_the_last_token_of_each_group(position: int, slot: int) -> None:
    assert run(Batch((1,), (position + 1,)), [[5, 2]], 64, 4) == [slot]


def test_ratio_128_pages_hold_two_entries() -> None:
    assert run(Batch((1,), (384,)), [[7, 9]], 2, 128) == [18]


def test_a_query_may_begin_and_end_inside_a_group() -> None:
    """Chunked prefill of positions 2..8 completes the groups at 3 and 7."""
    assert run(Batch((7,), (9,)), [[1]], 64, 4) == [-1, 64, -1, -1, -1, 65, -1]


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("block_size", "ratio"), SIZES)
def test_every_token_of_random_batches(block_size: int, ratio: int, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        batch = random_batch(rng, max_seq_len=3 * block_size * ratio + 9)
        table = random_table(rng, len(batch.seq_lens), 3, hostile=hostile)
        capacity = batch.num_tokens + rng.choice((0, 4))
        expected = [compressed_slot(table, request, p, block_size, ratio) for request, p in batch.tokens()]
        expected += [-1] * (capacity - batch.num_tokens)
        assert run(batch, table, block_size, ratio, capacity) == expected


def test_tokens_without_a_slot_complete_nothing() -> None:
    args = list(arguments(Batch((8,), (8,)), [[0]], 64, 4, 8))
    args[0] = torch.tensor([0, 0, 0, -1, 0, 0, 0, 7])
    compressed_slot_mapping(*args)
    assert args[-1].tolist() == [-1] * 7 + [1]


def test_a_padded_request_with_a_query_writes_nothing() -> None:
    """Captured batches pad requests with seq_len 0 but a query of the captured length: positions are negative."""
    args = list(arguments(Batch((4, 4), (4, 0)), [[3], [5]], 64, 4, 8))
    args[0] = torch.zeros(8, dtype=torch.int64)
    compressed_slot_mapping(*args)
    assert args[-1].tolist() == [-1, -1, -1, 192, -1, -1, -1, -1]


def samples() -> list[tuple]:
    table = [[5, 2, 7], [1, 0, 3]]
    plain = arguments(Batch((9, 300), (9, 700), padding=3), table, 64, 4, 320)
    spread = [x if not isinstance(x, Tensor) or i == 6 else strided(x) for i, x in enumerate(plain)]
    return [
        plain,
        (*spread[:6], padded(plain[6])),
        arguments(Batch((), ()), [], 64, 4, 5),
        arguments(Batch((1,), (128,)), [[4, 0, 0]], 2, 128, 1),
        arguments(Batch((0,), (0,), padding=2), [[0, 0, 0]], 2, 128, 2),
    ]


def test_op_contract() -> None:
    check_op(compressed_slot_mapping, samples())


def test_compiles_once_for_every_token_count() -> None:
    table = [[4, 2, 9]]

    def step(slots: Tensor, starts: Tensor, seq_lens: Tensor, blocks: Tensor) -> Tensor:
        out = torch.empty(64, dtype=torch.int64)
        compressed_slot_mapping(slots, starts, seq_lens, blocks, 2, 4, out)
        return out + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 8, 17):
            args = arguments(Batch((tokens,), (tokens,)), table, 2, 4, 64)[:4]
            torch._dynamo.mark_dynamic(args[0], 0)
            assert torch.equal(compiled(*args), step(*args))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 2, dtype=torch.int64), r"slot_mapping \[T\]"),
        (1, torch.zeros(4, dtype=torch.int32), "one element more"),
        (3, torch.zeros(1, 2), r"block_table \[R, B\]"),
        (5, 0, "ratio is at least 1"),
        (6, torch.zeros(1, dtype=torch.int64), "E204"),
        (6, torch.zeros(8, dtype=torch.int32), r"out \[N\]"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = list(arguments(Batch((2,), (2,)), [[0]], 64, 4, 8))
    args[position] = value
    with pytest.raises(InputError, match=message):
        compressed_slot_mapping(*args)
