from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.global_topk import global_topk, global_topk_ragged
from dsv4_compile.ops.metadata.ragged_from_dense import ragged_from_dense
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from dsv4_compile.testing.batch import index, random_table, table_tensor

I32 = torch.int32


def i32(values: list) -> Tensor:
    return torch.tensor(values, dtype=I32)


def unpack(flat: Tensor, indptr: Tensor) -> list[list[int]]:
    """Rows of a ragged list; the tail must be padding."""
    assert indptr[0] == 0
    assert (flat[indptr[-1] :] == -1).all()
    return [flat[start:end].tolist() for start, end in pairwise(indptr)]


def test_indices_become_slots_of_their_request() -> None:
    topk = i32([[0, 63, 64, -1], [2, 1, -1, -1], [5, -1, -1, -1]])
    slots, lens = global_topk(topk, i32([0, 1, 1]), i32([[5, 2], [1, 0]]), torch.tensor([True, True, False]), 64)
    assert_bitwise(slots, i32([[320, 383, 128, -1], [66, 65, -1, -1], [69, -1, -1, -1]]))
    assert_bitwise(lens, i32([3, 2, 0]))


@pytest.mark.parametrize("hostile", [False, True])
def test_every_index_of_random_batches(hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        rows, tokens, width, block_size = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 12), rng.choice((2, 64))
        table = random_table(rng, rows, 3, hostile=hostile)
        topk = hostile_indices((tokens, width), 3 * block_size, fraction=0.4 if hostile else 0.0)
        requests = hostile_indices((tokens,), rows, fraction=0.2 if hostile else 0.0)
        valid = torch.rand(tokens) < 0.8
        args = topk, requests, table_tensor(table), valid, block_size

        expected = [
            [index(table, request, local, block_size) for local in row]
            for request, row in zip(requests.tolist(), topk.tolist(), strict=True)
        ]
        compacted = [[s for s in row if s >= 0] if ok else [] for row, ok in zip(expected, valid.tolist(), strict=True)]
        slots, lens = global_topk(*args)
        assert slots.tolist() == expected
        assert lens.tolist() == [len(row) for row in compacted]
        flat, indptr, ragged_lens = global_topk_ragged(*args)
        assert unpack(flat, indptr) == compacted
        assert_bitwise(ragged_lens, lens)
        assert flat.shape == (tokens * width,)


def test_slots_are_contiguous_whatever_the_strides_of_the_indices() -> None:
    for columns in (0, 2):
        topk, table = torch.zeros(7, 5, dtype=I32).t(), torch.zeros(3, columns, dtype=I32)
        slots, _ = global_topk(topk, torch.zeros(5, dtype=I32), table, torch.ones(5, dtype=torch.bool), 4)
        assert slots.stride() == (7, 1)


def test_a_slot_that_int32_cannot_hold_is_no_slot() -> None:
    slots, lens = global_topk(i32([[0, 64]]), i32([0]), i32([[2**31 - 1, 3]]), torch.tensor([True]), 64)
    assert slots.tolist() == [[-1, 192]]
    assert lens.tolist() == [1]


def test_rows_may_have_the_middle_dim_of_attention_kernels_and_maps_may_be_longer() -> None:
    topk, table = hostile_indices((4, 6), 128), i32([[5, 2], [1, 0]])
    requests, valid = i32([0, 1, 1, 0, 9, 9]), torch.ones(6, dtype=torch.bool)
    plain = global_topk(topk, requests[:4], table, valid[:4], 64)
    for got, want in zip(global_topk(topk[:, None], requests, table, valid, 64), plain, strict=True):
        assert_bitwise(got, want, strides=True)


rows_strategy = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(-1, 40), min_size=width, max_size=width), min_size=1, max_size=5)
)


@given(rows=rows_strategy, columns=st.integers(0, 4), tokens=st.integers(0, 3))
def test_padding_never_changes_a_token(rows: list[list[int]], columns: int, tokens: int) -> None:
    """More -1 columns, and tokens that are padding, leave slots, lengths and lists as they were."""
    table, valid = i32([[5, 2, 9]]), torch.ones(len(rows), dtype=torch.bool)
    wide = i32([[*row, *[-1] * columns] for row in rows] + [[-1] * (len(rows[0]) + columns)] * tokens)
    args = i32(rows), i32([0] * len(rows)), table, valid, 16
    padded_args = wide, i32([0] * len(wide)), table, torch.cat((valid, valid.new_zeros(tokens))), 16
    slots, lens = global_topk(*args)
    wide_slots, wide_lens = global_topk(*padded_args)
    assert torch.equal(wide_slots[: len(rows), : len(rows[0])], slots)
    assert wide_lens.tolist() == lens.tolist() + [0] * tokens
    flat, indptr, _ = global_topk_ragged(*args)
    wide_flat, wide_indptr, _ = global_topk_ragged(*padded_args)
    assert unpack(wide_flat, wide_indptr) == unpack(flat, indptr) + [[]] * tokens


def samples() -> list[tuple]:
    table = i32([[5, 2, 7], [1, 0, 3]])
    args = hostile_indices((5, 8), 192), hostile_indices((5,), 2), table, torch.rand(5) < 0.7
    return [
        (*args, 64),
        (*map(strided, args), 64),
        (*map(padded, args), 64),
        (args[0][:, None].long(), args[1].long(), table, args[3], 64),
        (args[0][:0], args[1][:0], table, args[3][:0], 64),
        (args[0][:1, :0], args[1][:1], table, args[3][:1], 64),
        (args[0][:1], args[1][:1], table[:, :0], args[3][:1], 64),
        (args[0], args[1], table[:0], args[3], 64),
        (torch.full((2, 4), -1, dtype=I32), args[1][:2], table, args[3][:2], 64),
    ]


@pytest.mark.parametrize("op", [global_topk, global_topk_ragged])
def test_op_contracts(op: torch._ops.OpOverload) -> None:
    check_op(op, samples())


def test_compiles_once_for_every_token_count() -> None:
    table = i32([[5, 2, 7], [1, 0, 3]])

    def step(topk: Tensor, requests: Tensor, valid: Tensor) -> list[Tensor]:
        slots, lens = global_topk(topk, requests, table, valid, 64)
        ragged = global_topk_ragged(topk, requests, table, valid, 64)
        return [x + 1 for x in (slots, lens, *ragged, *ragged_from_dense(slots, lens))]

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 8, 33):
            args = hostile_indices((tokens, 16), 192), hostile_indices((tokens,), 2), torch.rand(tokens) < 0.7
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
            assert all(map(torch.equal, compiled(*args), step(*args)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 3, 4, dtype=I32), r"\[T, 1, K\]"),
        (0, torch.zeros(2, 4), r"topk_indices \[T, K\]"),
        (1, torch.zeros(1, dtype=I32), "token_to_req has a row for every token"),
        (2, torch.zeros(4, dtype=I32), r"block_table \[R, B\]"),
        (3, torch.ones(2, dtype=I32), r"is_valid_token \[N\] is bool"),
        (3, torch.ones(1, dtype=torch.bool), "is_valid_token has a row for every token"),
        (4, 0, "block_size is at least 1"),
    ],
)
def test_wrong_arguments_are_refused(position: int, value: object, message: str) -> None:
    args = [torch.zeros(2, 4, dtype=I32), i32([0, 0]), i32([[0]]), torch.ones(2, dtype=torch.bool), 64]
    args[position] = value
    for op in (global_topk, global_topk_ragged):
        with pytest.raises(InputError, match=message):
            op(*args)
