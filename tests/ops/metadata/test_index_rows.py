from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.reference.metadata.index_rows import flatten_rows, pack_rows, to_index, write_prefix
from dsv4_compile.testing import assert_bitwise


def i32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_slots_that_int32_cannot_hold_become_padding() -> None:
    slots = torch.tensor([-1, 0, 2**31 - 1, 2**31, 2**37])
    assert_bitwise(to_index(slots), i32([-1, 0, 2**31 - 1, -1, -1]))


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_what_values_do_not_reach_is_padded(shape: tuple[int, ...]) -> None:
    out = torch.full([size + 1 for size in shape], 9)
    write_prefix(out, torch.zeros(shape, dtype=torch.int64), -1)
    inside = tuple(slice(size) for size in shape)
    assert not out[inside].any()
    out[inside] = -1
    assert (out == -1).all()


def test_packing_keeps_the_order_and_counts() -> None:
    rows = i32([[5, 4, 9, 1], [7, 7, 7, 7], [1, 2, 3, 4]])
    keep = torch.tensor([[False, True, False, True], [False] * 4, [True] * 4])
    packed, counts = pack_rows(rows, keep)
    assert_bitwise(packed, i32([[4, 1, -1, -1], [-1] * 4, [1, 2, 3, 4]]))
    assert_bitwise(counts, i32([2, 0, 4]))


def test_flattening_clamps_lengths_to_the_row() -> None:
    flat, indptr = flatten_rows(i32([[1, 2], [3, 4], [5, 6]]), i32([-7, 1, 2**30]))
    assert_bitwise(flat, i32([3, 5, 6, -1, -1, -1]))
    assert_bitwise(indptr, i32([0, 0, 1, 3]))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_flattening_nothing_gives_an_empty_list(shape: tuple[int, int]) -> None:
    flat, indptr = flatten_rows(torch.zeros(shape, dtype=torch.int32), torch.full(shape[:1], 2, dtype=torch.int32))
    assert flat.shape == (0,)
    assert indptr.tolist() == [0] * (shape[0] + 1)
