"""The slot map of the indexer's choice against the reference, to the bit, every access checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import global_topk as kernel
from dsv4_compile.reference.metadata.global_topk import global_topk as reference
from dsv4_compile.testing import assert_bitwise, hostile_indices, hostile_values, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted


def compare(*args: Any) -> tuple[Tensor, Tensor]:
    with checked(mutated=("outputs[0]", "outputs[1]")):
        ours = kernel.global_topk(*args)
    for name, got, want in zip(("slots", "lens"), ours, reference(*args), strict=True):
        assert_bitwise(got, want, strides=True, label=name)
    return ours


def arguments(tokens: int, width: int, block_size: int = 4, columns: int = 6) -> tuple[Any, ...]:
    """A third of all indices, requests and blocks are out of range."""
    indices = hostile_indices((tokens, width), columns * block_size, fraction=0.3)
    requests = hostile_indices((tokens,), 3, fraction=0.3)
    table = hostile_indices((3, columns), 50, fraction=0.3)
    return indices, requests, table, torch.rand(tokens) < 0.8, block_size


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("global_topk"))))
def test_samples(number: int) -> None:
    compare(*op_samples("global_topk")[number])


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("tokens", "width"), [(9, 512), (1, 1), (3, 7), (4, 1024), (2, 1500), (2, 2049), (0, 8), (3, 0)]
)
def test_every_size(tokens: int, width: int) -> None:
    compare(*arguments(tokens, width))


@interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_integer_widths_and_a_middle_dim(dtype: torch.dtype) -> None:
    indices, requests, table, valid, block_size = arguments(5, 12)
    compare(indices.to(dtype)[:, None], requests.to(dtype), table.to(dtype), valid, block_size)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides_and_spare_tokens(spread: Callable[[Tensor], Tensor]) -> None:
    indices, requests, table, valid, block_size = arguments(6, 10)
    compare(spread(indices[:4]), spread(requests), spread(table), spread(valid), block_size)


@interpreted
def test_a_slot_that_int32_cannot_hold_is_dropped() -> None:
    blocks = torch.tensor([[2**29 - 1, 2**29, 2**31 - 1]], dtype=torch.int32)
    slots, lens = compare(torch.tensor([[3, 4, 11]]), torch.zeros(1, dtype=torch.int32), blocks, torch.ones(1) > 0, 4)
    assert slots.tolist() == [[2**31 - 1, -1, -1]]
    assert lens.tolist() == [1]


@interpreted
@pytest.mark.parametrize("columns", [0, 1])
def test_tables_without_columns_or_rows(columns: int) -> None:
    indices, requests, _, valid, block_size = arguments(4, 8)
    compare(indices, requests, torch.zeros(3, columns, dtype=torch.int32), valid, block_size)
    compare(indices, requests, torch.zeros(0, columns, dtype=torch.int32), valid, block_size)


@interpreted
def test_invalid_tokens_keep_their_slots_and_count_none() -> None:
    indices = torch.tensor([[0, 5, -1]] * len(hostile_values(1)))
    valid = torch.zeros(len(indices), dtype=torch.bool)
    requests = torch.zeros(len(indices), dtype=torch.int32)
    slots, lens = compare(indices, requests, torch.tensor([[7, 2]]), valid, 4)
    assert slots[0].tolist() == [28, 9, -1]
    assert not lens.any()


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        for width in (512, 1024):
            kernel.global_topk(*arguments(3, width))
    assert len(compiled) == 2
    assert all(binary.assembled for binary in compiled)
