"""IR of `compressed_slot_mapping` on a GPU against the reference on the same GPU: every slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.testing import hostile_indices
from tests.gpu.lowered import assert_equals_reference, launches

OP, BLOCK, COLUMNS = "compressed_slot_mapping", 64, 50


def inputs(tokens: int, requests: int = 33) -> list[Tensor]:
    """Queries of unequal length, tokens outside of all, a request that is padding, blocks that do not exist."""
    generator = torch.Generator().manual_seed(tokens)
    cuts = torch.randint(0, tokens + 1, (requests + 1,), generator=generator).sort().values.int()
    lens = cuts.diff() + torch.randint(0, 3000, (requests,), generator=generator).int()
    lens[1:2] = 0
    slots = torch.where(torch.arange(tokens) % 9 == 3, -1, torch.arange(tokens))
    table = hostile_indices((requests, COLUMNS), 100_000, fraction=0.2, generator=generator)
    return [x.cuda() for x in (slots, cuts, lens, table, torch.full((tokens + 5,), 12345))]


def call(op: Any, slots: Tensor, starts: Tensor, lens: Tensor, table: Tensor, out: Tensor) -> None:
    op(slots, starts, lens, table, BLOCK, 4, out)


@pytest.mark.parametrize("requests", [1, 33, 512])
@pytest.mark.parametrize("sizes", [(7, 64, 513, 16_384), (1,), (0,)])
def test_out_is_filled_as_by_the_reference(requests: int, sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, call, lambda t: inputs(t, requests), sizes, dynamic=(0, 4), written=(4,))


@pytest.mark.parametrize("tokens", [1, 250])
def test_one_launch_for_any_number_of_requests(tokens: int) -> None:
    assert [len(launches(OP, call, inputs(tokens, requests))) for requests in (1, 33, 512)] == [1, 1, 1]
