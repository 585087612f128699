"""`accept_drafts` against each request alone in NumPy, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.drafts import accept_drafts as kernels
from dsv4_compile.testing import padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.moe.programs import random_order
from tests.ops.drafts.drafting import accept_all, assert_accepted
from tests.ops.drafts.test_accept_drafts import STRANGE, calls
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
WRITTEN = ("results[0]", "results[1]", *(f"scratch[{i}]" for i in range(4)), "p_arrived", "p_tokens", "p_sums")


def run(args: tuple[Any, ...], tile: int = 16, seed: int = 0, room: int = 16) -> tuple[Tensor, Tensor]:
    """Run the kernels with tiles of so many tokens, programs in random order, over poisoned memory."""
    counters = torch.zeros(4096, dtype=torch.int32)
    with (
        mock.patch.object(kernels, "arrival_counters", lambda count, device: counters),
        mock.patch.object(kernels, "TILE", tile),
        mock.patch.object(kernels, "ROOM", room),
        poisoned_empty(),
        checked(mutated=WRITTEN) as launched,
        random_order(seed),
    ):
        result = kernels.accept_drafts(*args)
    assert launched == ["accept_verify_kernel", "accept_draw_kernel"] * (len(args[1]) > 0)
    assert not counters.any()
    assert all(x.is_contiguous() for x in result)
    return result


def check(args: tuple[Any, ...], **options: int) -> None:
    assert_accepted(run(args, **options), accept_all(*args), args[1].shape[1] + 1)


@interpreted
@pytest.mark.parametrize(
    ("number", "spread"),
    list(zip(range(len(op_samples("accept_drafts"))), itertools.cycle((padded, strided)), strict=False)),
)
def test_samples_of_any_strides(number: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = op_samples("accept_drafts")[number]
    check(tuple(spread(x) if isinstance(x, Tensor) and x.numel() else x for x in args), seed=number)


@interpreted
@pytest.mark.parametrize(("count", "dtype"), [(0, torch.float16), (1, torch.float32), (3, torch.bfloat16)])
def test_random_requests(count: int, dtype: torch.dtype) -> None:
    args = calls(12, count, vocabulary=45, dtype=dtype)
    for proposal in (args[2], None):
        check((*args[:2], proposal, *args[3:]), tile=32, seed=count)


@interpreted
def test_one_tile_one_token_and_many_tiles() -> None:
    for vocabulary, tile in ((1, 16), (16, 16), (17, 16), (40, 4)):
        check(calls(6, 1, vocabulary=vocabulary), tile=tile, seed=vocabulary)


@interpreted
def test_ties_and_zeros_of_both_signs() -> None:
    """Few distinct logits: ties fill tiles, and go beyond the last kept token."""
    args = list(calls(12, 1, vocabulary=50))
    args[0] = (args[0] / 2).round() / 2
    assert ((args[0] == 0) & args[0].signbit()).any()
    args[2] = args[2].round()
    check(tuple(args), tile=32, seed=3)
    args[0] = torch.zeros_like(args[0])
    check(tuple(args), tile=32, seed=4)


@interpreted
def test_whatever_the_numbers_are_a_token_is_in_range() -> None:
    numbers = torch.cartesian_prod(*[torch.tensor(STRANGE, dtype=torch.float64)] * 3)[::17]
    numbers = torch.nn.functional.pad(numbers, (0, 1))
    requests, at = len(numbers), torch.arange(len(numbers))
    logits, drafts = torch.randn(2 * requests, 7), torch.randint(0, 7, (requests, 1))
    num_new, tokens = run((logits, drafts, torch.randn(requests, 1, 7), numbers, at, at), tile=4)
    for row, count in zip(tokens.tolist(), num_new.tolist(), strict=True):
        assert all(0 <= token < 7 for token in row[:count])


def test_calls_that_are_unsupported() -> None:
    args = list(calls(1, 1))
    assert kernels.why_unsupported_accept_drafts(*args) == ""
    wide = torch.empty(2, kernels.MOST_TOKENS + 1, device="meta")
    assert "tokens" in kernels.why_unsupported_accept_drafts(wide, *args[1:])
    many = torch.empty(1, kernels.MOST_DRAFTS + 1, device="meta")
    assert "drafts" in kernels.why_unsupported_accept_drafts(args[0], many, *args[2:])


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    args = calls(2, 5, vocabulary=5000, dtype=torch.bfloat16)
    with compiled_for(target) as compiled:
        kernels.accept_drafts(*args)
        kernels.accept_drafts(*args[:2], None, *args[3:])
    assert all(binary.assembled for binary in compiled) and len(compiled) == 4
