from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.combine_topk_swa import combine_topk_swa, combine_topk_swa_ragged
from dsv4_compile.ops.metadata.prefill_gather_lens import prefill_gather_lens
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from dsv4_compile.testing.batch import Batch, random_batch, row


def i32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(batch: Batch, topk_indices: Tensor, *sizes: int, first: int = 0) -> list:
    """`sizes` are window, ratio, topk, m, n; `first` is the number of tokens in front of the chunk."""
    starts, seq_lens = batch.query_start_loc(), batch.seq_lens_tensor()
    return [topk_indices, starts + first, seq_lens, prefill_gather_lens(starts, seq_lens, 0, sizes[0]), *sizes]


def oracle(args: list) -> tuple[list[list[int]], list[int]]:
    """Token by token. A token outside the chunk's requests has an empty row."""
    topk_indices, starts, seq_lens, gather_lens, window, ratio, topk, m, n = args
    starts, seq_lens, gather_lens = starts.tolist(), seq_lens.tolist(), gather_lens.tolist()
    width = -(-(topk + window) // 128) * 128
    rows, lens = [], []
    for token, chosen in enumerate(topk_indices.tolist(), start=starts[0]):
        values: list[int] = []
        for b, (start, end) in enumerate(pairwise(starts)):
            position = seq_lens[b] - end + token
            if not start <= token < end or position < 0:
                continue
            gathered = range(seq_lens[b] - gather_lens[b], seq_lens[b])[: m - n]
            entries = chosen[: min((position + 1) // ratio, topk)]
            values += [entry + m * b if 0 <= entry < n else -1 for entry in entries]
            values += [
                m * b + n + p - gathered.start if p in gathered else -1
                for p in range(max(position - window + 1, 0), position + 1)
            ]
        rows.append(row(values, width))
        lens.append(len(values))
    return rows, lens


def test_selected_entries_come_first_and_the_window_behind_them() -> None:
    """The second request of a chunk: positions 8 and 9 see two entries and all raw tokens so far."""
    batch = Batch((1, 2), (1, 10))
    topk = torch.full((3, 512), -1, dtype=torch.int32)
    topk[1:, :2] = i32([[1, 0], [0, 1]])
    rows, lens = combine_topk_swa(*arguments(batch, topk, 128, 4, 512, 1000, 600))
    assert rows.shape == (3, 640)
    assert lens.tolist() == [1, 11, 12]
    assert rows[1].tolist() == row([1001, 1000, *range(1600, 1609)], 640)
    assert rows[2].tolist() == row([1000, 1001, *range(1600, 1610)], 640)


def test_offsets_count_from_the_first_token_of_the_chunk() -> None:
    topk = hostile_indices((9, 16), 40, fraction=0.0)
    batch = Batch((4, 5), (100, 9))
    near = combine_topk_swa(*arguments(batch, topk, 8, 4, 16, 60, 40))
    far = combine_topk_swa(*arguments(batch, topk, 8, 4, 16, 60, 40, first=731))
    assert all(map(torch.equal, near, far))


def test_a_layer_without_compression_attends_the_window_alone() -> None:
    args = arguments(Batch((3,), (3,)), torch.full((3, 64), 7, dtype=torch.int32), 128, 1, 0, 131, 0)
    rows, lens = combine_topk_swa(*args)
    assert rows.tolist() == [row(range(n), 128) for n in (1, 2, 3)]
    assert lens.tolist() == [1, 2, 3]


def test_a_missing_entry_never_becomes_a_row_of_another_request() -> None:
    """-1 + m * b would be the last row of the request before; n + m * b is a raw token."""
    args = arguments(Batch((8, 8), (8, 8)), i32([[-1, 5]] * 16), 4, 4, 2, 100, 5)
    rows, lens = combine_topk_swa(*args)
    assert rows[15, :6].tolist() == [-1, -1, 109, 110, 111, 112]
    assert lens[15] == 6


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("window", "ratio", "topk"), [(128, 4, 64), (8, 4, 3), (8, 128, 5), (8, 1, 0)])
def test_every_row_of_random_chunks(window: int, ratio: int, topk: int, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        batch = random_batch(rng, max_seq_len=160)
        n = 160 // ratio if topk else 0
        topk_indices = hostile_indices((batch.num_tokens, topk + 2), n, fraction=0.3 if hostile else 0.0)
        args = arguments(batch, topk_indices, window, ratio, topk, n + 300, n, first=rng.choice((0, 50)))
        if hostile:
            args[3] = hostile_indices(tuple(args[3].shape), 300)
        rows, lens = combine_topk_swa(*args)
        expected_rows, expected_lens = oracle(args)
        assert rows.tolist() == expected_rows
        assert lens.tolist() == expected_lens

        flat, indptr, ragged_lens = combine_topk_swa_ragged(*args)
        assert_bitwise(ragged_lens, lens)
        assert flat.shape == (batch.num_tokens * (topk + window),)
        ends = [0, *lens.cumsum(0).tolist()]
        assert indptr.tolist() == ends
        expected = [v for values, count in zip(expected_rows, expected_lens, strict=True) for v in values[:count]]
        assert flat.tolist() == row(expected, flat.shape[0])


@given(
    queries=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=4),
    columns=st.integers(0, 5),
    pads=st.integers(0, 3),
)
def test_padding_never_changes_a_token(queries: list[tuple[int, int]], columns: int, pads: int) -> None:
    query_lens = tuple(query_len for query_len, _ in queries)
    seq_lens = tuple(query_len + context for query_len, context in queries)
    batch = Batch(query_lens, seq_lens)
    wider = Batch(query_lens + (0,) * pads, seq_lens + (0,) * pads, padding=pads)
    topk = hostile_indices((batch.num_tokens, 6), 20, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(topk, (0, columns, 0, pads), value=-1)
    bare = combine_topk_swa(*arguments(batch, topk, 8, 4, 6, 90, 20))
    full = combine_topk_swa(*arguments(wider, wide, 8, 4, 6, 90, 20))
    assert all(torch.equal(a, b[: batch.num_tokens]) for a, b in zip(bare, full, strict=True))
    assert (full[0][batch.num_tokens :] == -1).all()
    assert not full[1][batch.num_tokens :].any()


def samples() -> list[list]:
    plain = arguments(Batch((9, 30), (9, 70), padding=2), hostile_indices((41, 16), 20), 8, 4, 16, 70, 20, first=3)
    return [
        plain,
        [strided(x) if isinstance(x, Tensor) else x for x in plain],
        [*map(padded, plain[:1]), *(x.long() for x in plain[1:4]), *plain[4:]],
        arguments(Batch((1,), (40,)), hostile_indices((1, 4), 10), 8, 4, 4, 40, 10),
        arguments(Batch((3,), (3,)), torch.empty(3, 0, dtype=torch.int32), 8, 1, 0, 20, 0),
        arguments(Batch((0,), (0,)), torch.empty(0, 4, dtype=torch.int32), 8, 4, 4, 40, 10),
        arguments(Batch((), (), padding=2), torch.zeros(2, 4, dtype=torch.int32), 8, 4, 4, 40, 10),
    ]


@pytest.mark.parametrize("op", [combine_topk_swa, combine_topk_swa_ragged])
def test_op_contracts(op: torch._ops.OpOverload) -> None:
    check_op(op, samples())


def test_compiles_once_for_every_token_count() -> None:
    def step(*tensors: Tensor) -> list[Tensor]:
        sizes = (8, 4, 16, 90, 20)
        return [x + 1 for x in (*combine_topk_swa(*tensors, *sizes), *combine_topk_swa_ragged(*tensors, *sizes))]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 9, 33):
            batch = Batch((2, tokens - 2), (60, tokens))
            args = arguments(batch, hostile_indices((tokens, 16), 20), 8, 4, 16, 90, 20)[:4]
            torch._dynamo.mark_dynamic(args[0], 0)
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 1, 4, dtype=torch.int32), r"topk_indices \[T, K\]"),
        (1, i32([0, 1, 2]), "one element more than seq_lens"),
        (3, i32([1, 1]), "one element more than gather_lens"),
        (4, 0, "window is at least 1"),
        (5, 0, "ratio is at least 1"),
        (6, 5, "topk is between 0 and 4"),
        (8, 41, "n is between 0 and 40"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = arguments(Batch((2,), (2,)), torch.zeros(2, 4, dtype=torch.int32), 8, 4, 4, 40, 10)
    args[position] = value
    for op in (combine_topk_swa, combine_topk_swa_ragged):
        with pytest.raises(InputError, match=message):
            op(*args)
