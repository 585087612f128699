"""Fusion of an all-reduce over ranks with the boundary after it. Results keep every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.parallel import symmetric
from tests.backend.test_fuse_streams import BOUNDARY, MIX, D, compare, post_pre

ops: Any = torch.ops.dsv4


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sum over ranks be that of two with the same part."""
    monkeypatch.setattr(symmetric, "functional_all_reduce", lambda x, name: x + x)


def reduced(part: Tensor) -> Tensor:
    total: Tensor = torch.ops.dsv4_collectives.all_reduce(part.contiguous(), "tp")
    return total


BOUNDARIES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "a boundary": lambda streams, part, *rest: ops.mhc_boundary(streams, reduced(part), *rest, *MIX),
    "views": lambda streams, part, *rest: ops.mhc_boundary(
        streams, reduced(part).view(2, -1, D).flatten(0, 1), *rest, *MIX
    ),
    "a post and a pre": lambda streams, part, *rest: post_pre(streams, reduced(part), *rest),
}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("form", BOUNDARIES)
def test_an_all_reduce_is_a_part_of_the_boundary_after_it(form: str) -> None:
    result = compare(BOUNDARIES[form])
    assert result.ops == {} and result.targets["all_reduce_mhc_boundary"] == 1
    assert result.targets["all_reduce"] == 0
    last = result.fusions[-1]
    assert (last.ops, last.into, last.fused) == (("all_reduce", "mhc_boundary"), "all_reduce_mhc_boundary", True)


@pytest.mark.usefixtures("two_ranks")
def test_a_sum_that_others_use_or_read_otherwise_stays_an_all_reduce() -> None:
    def used_twice(streams: Tensor, part: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        total = reduced(part)
        return (*ops.mhc_boundary(streams, total, *rest, *MIX), total.float().sum())

    def transposed(streams: Tensor, part: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        total = reduced(part.view(2, -1, D)).flatten(0, 1)
        return tuple(ops.mhc_boundary(streams, total, *rest, *MIX))

    for body, reason in ((used_twice, "also uses the sum of the ranks"), (transposed, "in another shape")):
        result = compare(body)
        assert result.ops == BOUNDARY and result.targets["all_reduce"] == 1
        assert reason in result.reasons[0]
    result = compare(BOUNDARIES["a boundary"], {"dsv4.fuse": "auto"})
    assert result.ops == BOUNDARY and "the kernel alone reads what other ranks have" in result.reasons[0]
