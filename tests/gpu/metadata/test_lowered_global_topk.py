"""IR of `global_topk` on a GPU against the reference on the same GPU: every index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.testing import hostile_indices
from tests.gpu.lowered import assert_equals_reference, launches

OP, BLOCK, REQUESTS, COLUMNS = "global_topk", 64, 32, 100


def inputs(tokens: int, width: int = 1024) -> list[Tensor]:
    """Hostile indices of every kind."""
    generator = torch.Generator().manual_seed(tokens)
    tensors = [
        hostile_indices((tokens, width), BLOCK * COLUMNS, generator=generator),
        hostile_indices((tokens,), REQUESTS, fraction=0.2, generator=generator),
        hostile_indices((REQUESTS, COLUMNS), 2**24, fraction=0.2, generator=generator),
        torch.rand(tokens, generator=generator) < 0.8,
    ]
    return [x.cuda() for x in tensors]


def call(op: Any, topk: Tensor, requests: Tensor, table: Tensor, is_valid: Tensor) -> tuple[Tensor, Tensor]:
    return op(topk, requests, table, is_valid, BLOCK)


@pytest.mark.parametrize("width", [512, 1024, 2048, 100])
@pytest.mark.parametrize("sizes", [(7, 64, 2049), (1,), (0,)])
def test_slots_and_counts_are_those_of_the_reference(width: int, sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, call, lambda t: inputs(t, width), sizes, dynamic=(0, 1, 3))


@pytest.mark.parametrize("tokens", [1, 250])
def test_one_launch(tokens: int) -> None:
    assert len(launches(OP, call, inputs(tokens))) == 1
