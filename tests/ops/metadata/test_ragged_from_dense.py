"""`ragged_from_dense`: dense rows as one list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.ragged_from_dense import ragged_from_dense
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from tests.ops.metadata.test_global_topk import I32, i32, rows_strategy, unpack


def test_dense_rows_become_a_list_without_padding() -> None:
    flat, indptr = ragged_from_dense(i32([[7, 8, 9], [4, -1, 6], [1, 2, 3], [5, 5, 5]]), i32([2, 3, 0, 99]))
    assert_bitwise(indptr, i32([0, 2, 4, 4, 7]))
    assert_bitwise(flat, i32([7, 8, 4, 6, 5, 5, 5, -1, -1, -1, -1, -1]))


@given(rows=rows_strategy, data=st.data())
def test_ragged_lists_hold_the_first_entries_that_are_indices(rows: list[list[int]], data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(-2, 8), min_size=len(rows), max_size=len(rows)))
    expected = [[v for v in row[: max(n, 0)] if v >= 0] for row, n in zip(rows, lens, strict=True)]
    assert unpack(*ragged_from_dense(i32(rows), i32(lens))) == expected


def test_op_contract_of_ragged_from_dense() -> None:
    args = hostile_indices((5, 8), 99), hostile_indices((5,), 9)
    check_op(
        ragged_from_dense,
        [
            args,
            tuple(map(strided, args)),
            (padded(args[0])[:, None], args[1].long()),
            (args[0][:0], args[1][:0]),
            (args[0][:1, :0], args[1][:1]),
            (args[0][:1], args[1][:1]),
        ],
    )


def test_lengths_behind_the_rows_are_not_read() -> None:
    rows, lens = i32([[7, 8], [4, -1]]), i32([2, 2])
    longer = torch.cat((lens, i32([9, -1])))
    assert all(map(torch.equal, ragged_from_dense(rows, longer), ragged_from_dense(rows, lens)))


def test_ragged_from_dense_refuses_missing_lengths() -> None:
    with pytest.raises(InputError, match="lens has a row for every token"):
        ragged_from_dense(torch.zeros(3, 4, dtype=I32), i32([1, 1]))
