"""The kernel that copies lists to graph buffers against the reference, to the bit, every access checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import copy_ragged_to_graph_buffers as kernel
from dsv4_compile.reference.metadata.copy_ragged_to_graph_buffers import copy_ragged_to_graph_buffers as reference
from dsv4_compile.testing import assert_bitwise, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted


def compare(*args: Tensor) -> None:
    def copied(value: Tensor) -> Tensor:
        memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone()
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    ours, theirs = ([copied(value) for value in args] for _ in range(2))
    with checked(mutated=("outputs[0]", "outputs[1]")) as launched:
        kernel.copy_ragged_to_graph_buffers(*ours)
    reference(*theirs)
    assert launched == ["copy_ragged_kernel"]
    for a, b in zip(ours, theirs, strict=True):
        memory = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in (a, b))
        assert_bitwise(*memory)


def arguments(rows: int, available: int, room: int, row_room: int) -> tuple[Tensor, ...]:
    ends = torch.randint(0, max(available, 1), (rows + 1,)).sort().values.int()
    ends[0] = 0
    stale = (torch.full((size,), 777, dtype=torch.int32) for size in (room, row_room))
    return torch.randint(900, (available,)), ends, *stale


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("copy_ragged_to_graph_buffers"))))
def test_samples(number: int) -> None:
    compare(*op_samples("copy_ragged_to_graph_buffers")[number])


@interpreted
@pytest.mark.parametrize(
    "sizes", [(5, 20, 30, 9), (5, 20, 8, 6), (0, 0, 1, 1), (0, 4, 0, 1), (1, 9, 3000, 2), (3, 4000, 2100, 1500)]
)
def test_any_sizes(sizes: tuple[int, int, int, int]) -> None:
    compare(*arguments(*sizes))


@interpreted
def test_ends_that_are_none() -> None:
    indices, _, *stale = arguments(3, 20, 12, 7)
    for ends in ([-5, 3, 900], [2**31 - 1] * 3, [-(2**31)] * 3):
        compare(indices, torch.tensor(ends), *stale)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Any) -> None:
    compare(*(spread(x) for x in arguments(5, 20, 30, 9)))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        kernel.copy_ragged_to_graph_buffers(*arguments(5, 20, 30, 9))
    assert all(binary.assembled for binary in compiled)
    assert len(compiled) == 1
