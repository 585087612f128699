from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.attention_backends.rocm import copy_ragged_to_graph_buffers as copy_and_view
from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.copy_ragged_to_graph_buffers import copy_ragged_to_graph_buffers
from dsv4_compile.testing import check_op, padded, strided
from dsv4_compile.testing.samples import op_samples

STALE = 777


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def stale(size: int) -> torch.Tensor:
    return torch.full((size,), STALE, dtype=torch.int32)


def test_lists_are_copied_and_the_rest_is_padding() -> None:
    indices, indptr = stale(6), stale(5)
    copy_ragged_to_graph_buffers(ints(5, 6, 7, 99, 99), ints(0, 2, 3), indices, indptr)
    assert indices.tolist() == [5, 6, 7, -1, -1, -1]
    assert indptr.tolist() == [0, 2, 3, 3, 3]


def test_random_lists(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        rows = [[rng.randint(0, 999) for _ in range(rng.randint(0, 5))] for _ in range(rng.randint(0, 6))]
        flat = [i for row in rows for i in row]
        ends = [sum(map(len, rows[:r])) for r in range(len(rows) + 1)]
        capacity = ints(*flat, *[STALE] * rng.randint(0, 9))
        indices, indptr = stale(30), stale(10)
        copy_ragged_to_graph_buffers(capacity.long(), ints(*ends), indices, indptr)
        assert indices.tolist() == flat + [-1] * (30 - len(flat))
        assert indptr.tolist() == ends + [ends[-1]] * (9 - len(rows))


def test_what_does_not_fit_is_cut_and_never_written_behind_the_buffer() -> None:
    memory = stale(6)
    indptr = stale(4)
    copy_ragged_to_graph_buffers(ints(1, 2, 3, 4, 5), ints(0, 2, 5), memory[:4], indptr)
    assert memory.tolist() == [1, 2, 3, 4, STALE, STALE]
    assert indptr.tolist() == [0, 2, 4, 4]
    copy_ragged_to_graph_buffers(ints(1, 2), ints(-3, 2, 9), memory[:4], indptr)
    assert memory.tolist() == [1, 2, -1, -1, STALE, STALE]
    assert indptr.tolist() == [0, 2, 2, 2]


def test_views_depend_on_the_number_of_rows_alone() -> None:
    indices, indptr = stale(12), stale(5)
    seen = set()
    for lists, ends in ((ints(1, 2, 3), ints(0, 1, 3)), (ints(), ints(0, 0, 0))):
        flat, rows = copy_and_view(lists, ends, indices, indptr, 2, 3)
        seen.add((flat.data_ptr(), flat.shape, rows.data_ptr(), rows.shape))
        assert rows.tolist() == ends.tolist()
    assert seen == {(indices.data_ptr(), torch.Size([6]), indptr.data_ptr(), torch.Size([3]))}
    flat, rows = copy_and_view(ints(), ints(0), indices, indptr, 0, 3)
    assert (flat.shape, rows.tolist()) == (torch.Size([1]), [0])


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_change_nothing(spread: object) -> None:
    indices, indptr = spread(stale(6)), spread(stale(4))
    copy_ragged_to_graph_buffers(spread(ints(5, 6, 7)), spread(ints(0, 2, 3)), indices, indptr)
    assert (indices.tolist(), indptr.tolist()) == ([5, 6, 7, -1, -1, -1], [0, 2, 3, 3])


def test_promises() -> None:
    check_op(copy_ragged_to_graph_buffers, op_samples("copy_ragged_to_graph_buffers")[1:])


def test_compiled_it_does_the_same() -> None:
    args = op_samples("copy_ragged_to_graph_buffers")[0]
    twin = [x.clone() for x in args]
    copy_ragged_to_graph_buffers(*args)
    torch.compile(copy_ragged_to_graph_buffers, backend="aot_eager", fullgraph=True, dynamic=True)(*twin)
    assert all(map(torch.equal, args, twin))


def test_wrong_arguments_are_refused() -> None:
    for indptr, buffer in ((ints(), stale(3)), (ints(0, 1, 2, 3), stale(3)), (ints(0), stale(3).long())):
        with pytest.raises(InputError, match="E20"):
            copy_ragged_to_graph_buffers(ints(1), indptr, stale(4), buffer)
