"""`markov_drafts` against each request alone in NumPy, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, inf, nan

from dsv4_compile.kernels.drafts import markov_drafts as kernels
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.moe.programs import random_order
from tests.ops.drafts.drafting import markov_all
from tests.ops.drafts.test_markov_drafts import calls
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
WRITTEN = ("p_logits", "p_drafts", "summaries[0]", "summaries[1]", "summaries[2]")


def check(args: tuple[Any, ...], seed: int = 0, exact: bool = True) -> None:
    with (
        mock.patch.object(kernels, "BLOCK_V", 16),
        poisoned_empty(),
        checked(mutated=WRITTEN) as launched,
        random_order(seed),
    ):
        drafts, logits = kernels.markov_drafts(*args)
    requests, count = args[0].shape[:2]
    assert launched == ["markov_logits_kernel", "markov_choose_kernel"] * (count if requests else 0)
    wanted, want_logits = markov_all(*args)
    assert_bitwise(drafts, wanted)
    tolerance = 0.0 if exact else 1e-5
    torch.testing.assert_close(logits, want_logits.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("markov_drafts"))))
@pytest.mark.parametrize("spread", [lambda x: x, padded, strided])
def test_samples_of_any_strides(number: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = op_samples("markov_drafts")[number]
    check(tuple(spread(x) if x.numel() else x for x in args), seed=number, exact=False)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_requests(dtype: torch.dtype) -> None:
    for requests, count, vocabulary in ((1, 5, 13), (21, 2, 70), (3, 1, 1)):
        check(calls(requests, count, vocabulary, dtype), seed=requests)


@interpreted
def test_unknown_tokens_and_logits_give_no_drafts_from_there_on() -> None:
    args = calls(8, 4, 40, dtype=torch.float32)
    base, anchors = args[:2]
    anchors[0], anchors[5], anchors[6] = -1, 40, -(2**40)
    base[1, 0] = nan
    base[2, 2, 4] = nan
    base[3, 1] = -inf
    base[4, 3, 1] = inf
    base[7, :, ::2] = -inf
    check(args)


@interpreted
def test_a_rank_that_no_block_divides() -> None:
    args = list(calls(2, 2, 20, dtype=torch.float32))
    args[2], args[3] = (torch.randint(-2, 3, (20, 100)).float() for _ in range(2))
    check(tuple(args))


def test_calls_that_are_unsupported() -> None:
    args = list(calls(1, 1))
    assert kernels.why_unsupported_markov_drafts(*args) == ""
    args[2] = torch.empty(kernels.MOST_TILES * kernels.BLOCK_V + 1, 6, device="meta")
    assert "tokens" in kernels.why_unsupported_markov_drafts(*args)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        for dtype in (torch.bfloat16, torch.float32):
            kernels.markov_drafts(*calls(2, 1, 300, dtype))
    assert all(binary.assembled for binary in compiled) and len(compiled) == 4
