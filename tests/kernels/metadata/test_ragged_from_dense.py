"""The kernels that make one list of rows of indices against the references, to the bit, every access checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import global_topk as mapping
from dsv4_compile.kernels.metadata import ragged_from_dense as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from dsv4_compile.testing.poison import poisoned_empty
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
WRITTEN = ("p_counts", "outputs[0]", "outputs[1]")
OPS = ("ragged_from_dense", "global_topk_ragged")


def compare(op: str, *args: Any) -> tuple[Tensor, ...]:
    """Run both over poisoned memory."""
    with checked(mutated=WRITTEN), poisoned_empty():
        ours = launcher(op)(*args)
    theirs = REFERENCES[op](*args)
    for a, b in zip(ours, theirs, strict=True):
        assert_bitwise(a, b, strides=True)
    return ours


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_samples(op: str) -> None:
    for args in op_samples(op):
        compare(op, *args)


@interpreted
@pytest.mark.parametrize(("tokens", "width"), [(0, 5), (1, 1), (1, 7), (5, 3), (9, 40), (3, 0)])
def test_any_sizes(tokens: int, width: int) -> None:
    rows = hostile_indices((tokens, width), 50, fraction=0.3)
    lens = torch.randint(-2, width + 3, (tokens,), dtype=torch.int32)
    compare("ragged_from_dense", rows, lens)
    compare("ragged_from_dense", rows[:, None], lens.long())


@interpreted
def test_more_columns_than_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MAX_COLUMNS", 8)
    monkeypatch.setattr(mapping, "MAX_COLUMNS", 8)
    rows = hostile_indices((6, 37), 50, fraction=0.3)
    compare("ragged_from_dense", rows, torch.tensor([37, 0, 36, 9, 1, 40]))
    compare("global_topk_ragged", *arguments(rows))


@interpreted
def test_rows_that_are_all_kept_and_rows_that_are_not() -> None:
    rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    for lens in ([4, 4, 4], [0, 0, 0], [4, 0, 4], [-(2**31), 2**31 - 1, 2]):
        compare("ragged_from_dense", rows, torch.tensor(lens))
    compare("ragged_from_dense", torch.full((3, 4), -1, dtype=torch.int32), torch.tensor([4, 4, 4]))


def arguments(rows: Tensor) -> tuple[Any, ...]:
    tokens = rows.shape[0]
    table = torch.randperm(21).view(3, 7).int()
    return rows, torch.randint(0, 3, (tokens,), dtype=torch.int32), table, torch.rand(tokens) < 0.7, 8


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Any) -> None:
    rows = hostile_indices((5, 12), 50, fraction=0.3)
    compare("ragged_from_dense", spread(rows), spread(torch.tensor([3, 12, 0, 7, 12])))
    compare("global_topk_ragged", *(spread(x) if isinstance(x, Tensor) else x for x in arguments(rows)))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    rows = torch.zeros(3, 512, dtype=torch.int32)
    with compiled_for(target) as compiled:
        kernel.ragged_from_dense(rows[:, :128], torch.zeros(3, dtype=torch.int32))
        mapping.global_topk_ragged(*arguments(rows))
    assert all(binary.assembled for binary in compiled)
    assert len(compiled) == 4
