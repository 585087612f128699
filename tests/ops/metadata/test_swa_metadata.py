from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.prefill_gather_lens import prefill_gather_lens
from dsv4_compile.ops.metadata.swa_metadata import swa_metadata
from dsv4_compile.testing import padded, strided
from dsv4_compile.testing.batch import Batch, random_batch, random_table, row, table_tensor, window_row

STALE = 12345


def buffers(capacity: int, window: int) -> list[Tensor]:
    return [
        torch.full((capacity,), STALE, dtype=torch.int32),
        torch.ones(capacity, dtype=torch.bool),
        torch.full((capacity, 1, window), STALE, dtype=torch.int32),
        torch.full((capacity,), STALE, dtype=torch.int32),
    ]


def arguments(
    batch: Batch,
    table: list[list[int]],
    num_decode_tokens: int | None = None,
    *,
    block_size: int = 64,
    window: int = 128,
    capacity: int | None = None,
) -> list:
    return [
        batch.query_start_loc(),
        batch.seq_lens_tensor(),
        table_tensor(table, columns=3),
        batch.slot_mapping(),
        block_size,
        window,
        batch.num_tokens if num_decode_tokens is None else num_decode_tokens,
        *buffers(batch.num_tokens if capacity is None else capacity, window),
    ]


def run(*args: object, **kwargs: object) -> list[list]:
    values = arguments(*args, **kwargs)
    swa_metadata(*values)
    return [x.flatten(1).tolist() if x.dim() == 3 else x.tolist() for x in values[-4:]]


def test_a_short_window_is_followed_by_padding() -> None:
    _, _, indices, lens = run(Batch((1,), (6,)), [[3]])
    assert indices == [[192, 193, 194, 195, 196, 197] + [-1] * 122]
    assert lens == [6]


def test_a_full_window_crosses_pages_in_order_of_position() -> None:
    _, _, indices, lens = run(Batch((1,), (201,)), [[3, 8, 1, 4]])
    assert indices == [[*range(521, 576), *range(64, 128), *range(256, 265)]]
    assert lens == [128]


def test_only_decode_tokens_get_rows_and_all_buffers_are_completed() -> None:
    to_req, valid, indices, lens = run(Batch((1, 2, 3), (9, 2, 3), padding=1), [[0], [1], [2]], 3, window=4, capacity=9)
    assert to_req == [0, 1, 1, 2, 2, 2, 0, 0, 0]
    assert valid == [True] * 6 + [False] * 3
    assert indices == [[5, 6, 7, 8], [64, -1, -1, -1], [64, 65, -1, -1]] + [[-1] * 4] * 6
    assert lens == [4, 1, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("block_size", "window"), [(64, 128), (4, 6)])
def test_every_row_of_random_batches(block_size: int, window: int, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        batch = random_batch(rng, max_seq_len=3 * block_size + 2)
        table = random_table(rng, len(batch.seq_lens), 3, hostile=hostile)
        tokens = batch.tokens()
        split, capacity = rng.randint(0, len(tokens)), len(tokens) + rng.choice((0, 3))
        to_req, valid, indices, lens = run(batch, table, split, block_size=block_size, window=window, capacity=capacity)
        pads = capacity - len(tokens)
        assert to_req == [max(request, 0) for request, _ in tokens] + [0] * pads
        assert valid == [position >= 0 for _, position in tokens] + [False] * pads
        expected = [window_row(table, *token, window, block_size) for token in tokens[:split]]
        assert indices == [r for r, _ in expected] + [row([], window)] * (capacity - split)
        assert lens == [n for _, n in expected] + [0] * (capacity - split)


def test_an_invalid_token_has_an_empty_row() -> None:
    args = arguments(Batch((1, 1), (6, 6)), [[3], [4]], window=4)
    args[3] = torch.tensor([-1, 2])
    swa_metadata(*args)
    assert args[-3].tolist() == [False, True]
    assert args[-2][:, 0].tolist() == [[-1] * 4, [258, 259, 260, 261]]
    assert args[-1].tolist() == [0, 4]


def test_pages_behind_the_window_are_not_looked_at() -> None:
    """The cache manager recycles them: their entries may hold anything."""
    clean, dirty = (run(Batch((1,), (201,)), [[first, 8, 1, 4]]) for first in (3, 2**31 - 1))
    assert clean == dirty


def test_rows_without_the_middle_dim_are_the_same() -> None:
    args = arguments(Batch((2,), (70,)), [[3, 5]])
    flat = [*args[:-2], args[-2][:, 0].clone(), args[-1].clone()]
    swa_metadata(*args)
    swa_metadata(*flat)
    assert torch.equal(flat[-2], args[-2][:, 0])


@given(
    queries=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=4),
    pads=st.integers(0, 3),
    columns=st.integers(0, 2),
)
def test_padding_never_changes_a_token(queries: list[tuple[int, int]], pads: int, columns: int) -> None:
    """Padded requests, tokens and table columns leave every real token as it was."""
    query_lens = tuple(query_len for query_len, _ in queries)
    seq_lens = tuple(query_len + context for query_len, context in queries)
    table = [[4 * request + page for page in range(4)] for request in range(len(queries))]
    bare = run(Batch(query_lens, seq_lens), table)
    wide = [[*pages, *[7] * columns] for pages in table] + [[-1] * (4 + columns)] * pads
    full = run(Batch(query_lens + (0,) * pads, seq_lens + (0,) * pads, padding=pads), wide)
    tokens = sum(query_lens)
    assert bare == [values[:tokens] for values in full]


def samples() -> list[list]:
    table = [[5, 2, 7], [1, 0, 3]]
    plain = arguments(Batch((1, 9), (150, 9), padding=3), table, 4, capacity=20)
    views = [strided(x) if isinstance(x, Tensor) else x for x in plain]
    return [
        plain,
        [*views[:9], *(padded(x) for x in plain[9:])],
        [*plain[:9], plain[9][:, 0], plain[10]],
        arguments(Batch((), ()), [], capacity=2),
        arguments(Batch((1,), (1,)), [[0, 0, 0]], window=5),
    ]


def test_compiles_once_for_every_token_count() -> None:
    def step(slots: Tensor, starts: Tensor, seq_lens: Tensor, blocks: Tensor) -> list[Tensor]:
        out = [torch.empty_like(x) for x in buffers(64, 128)]
        swa_metadata(starts, seq_lens, blocks, slots, 64, 128, 4, *out)
        return [x.clone() for x in (*out, prefill_gather_lens(starts, seq_lens, 1, 128))]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 9, 33):
            starts, seq_lens, table, slots = arguments(Batch((1, tokens - 1), (70, 80)), [[3, 1], [0, 2]])[:4]
            torch._dynamo.mark_dynamic(slots, 0)
            args = slots, starts, seq_lens, table
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(3, dtype=torch.int32), "one element more"),
        (5, 0, "window is at least 1"),
        (6, 3, "num_decode_tokens is between 0 and 2"),
        (7, torch.zeros(1, dtype=torch.int32), "E204"),
        (8, torch.zeros(2, dtype=torch.int32), r"is_valid_token \[N\]"),
        (9, torch.zeros(2, 1, 64, dtype=torch.int32), "64 instead of 128"),
        (9, torch.zeros(2, 2, 128, dtype=torch.int32), r"\[T, 1, K\]"),
        (10, torch.zeros(1, dtype=torch.int32), "E204"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = arguments(Batch((2,), (2,)), [[0]])
    args[position] = value
    with pytest.raises(InputError, match=message):
        swa_metadata(*args)
