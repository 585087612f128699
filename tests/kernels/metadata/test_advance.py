"""The kernel that moves a decode batch one step on, against the reference, to the bit, every access checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import advance as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_bitwise, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
MUTATED = tuple(f"batch[{i}]" for i in range(4))


def copied(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).clone()
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def compare(args: tuple[Any, ...]) -> None:
    """Run both for three steps in place; all memory behind the buffers must stay equal."""
    ours, theirs = ([copied(value) for value in args] for _ in range(2))
    for _ in range(3):
        with checked(mutated=MUTATED) as launched:
            launcher("advance")(*ours)
        REFERENCES["advance"](*theirs)
        assert launched == ["advance_kernel"]
        for a, b in zip(ours[5:], theirs[5:], strict=True):
            assert_bitwise(a, b)
            memory = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in (a, b))
            assert_bitwise(*memory)


def arguments(requests: int, query_len: int, width: int, rows: int = 0) -> tuple[Any, ...]:
    queries = torch.randint(0, 2 * query_len, (requests,))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int()
    return (
        torch.randint(-2, query_len + 3, (requests,)),
        torch.randint(1, 99, (requests, width)),
        torch.randint(1, 99, (requests, query_len - 1)) if query_len > 1 else None,
        torch.randint(0, 60, (requests,), dtype=torch.int32),
        query_len,
        starts,
        torch.where(torch.rand(requests) < 0.2, 0, torch.randint(0, 50, (requests,))).int(),
        torch.full((max(rows, requests * query_len),), 12345),
        torch.randint(0, 2, (requests,), dtype=torch.int32),
    )


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("advance"))))
def test_samples(number: int) -> None:
    compare(op_samples("advance")[number])


@interpreted
@pytest.mark.parametrize("query_len", [1, 2, 5])
def test_random_batches(query_len: int) -> None:
    for requests in (0, 1, 2, 7, 64):
        compare(arguments(requests, query_len, width=query_len, rows=requests * query_len + 3))


@interpreted
def test_more_requests_and_tokens_than_are_moved_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MAX_REQUESTS", 4)
    monkeypatch.setattr(kernel, "TAIL", 8)
    compare(arguments(19, 2, width=1, rows=70))
    compare(arguments(16, 3, width=5))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Any) -> None:
    compare(tuple(spread(x) if isinstance(x, Tensor) else x for x in arguments(9, 3, width=3, rows=40)))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        launcher("advance")(*arguments(128, 1, 1))
        launcher("advance")(*arguments(128, 4, 4))
    assert all(binary.assembled for binary in compiled)
    assert len(compiled) == 2
