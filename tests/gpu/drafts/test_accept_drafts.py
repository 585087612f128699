"""`accept_drafts` on a GPU against the reference there: large vocabularies, repeats, capture, any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.drafts.accept_drafts import accept_drafts
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing.samples import op_samples

REFERENCE = REFERENCES["accept_drafts"]
CHOICES = [(0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.6, 50.0, 1.0), (1.0, 0.0, 0.9), (0.8, 1000.0, 0.95), (1.2, 7.0, 0.5)]
"""Temperature, top-k and top-p."""


def problem(requests: int, count: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    """Requests of all choices, with likely drafts."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    logits = (3 * randn(requests * (count + 1), vocabulary)).to(dtype)
    rows = logits.view(requests, count + 1, vocabulary)[:, :-1]
    draft_logits = rows.float() + 0.3 * randn(requests, count, vocabulary)
    sampled = (draft_logits / 0.7).softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(requests, count)
    first = torch.arange(requests, device="cuda") % 2 == 0
    drafts = torch.where(first[:, None], rows.argmax(-1), sampled)
    choices = torch.tensor(CHOICES, dtype=torch.float64, device="cuda")
    numbers = torch.nn.functional.pad(choices[torch.arange(requests, device="cuda") % len(CHOICES)], (0, 1))
    ids = torch.arange(requests, device="cuda")
    return [logits, drafts, draft_logits, numbers, ids * 7919 + seed, ids * 1000]


def assert_equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("number", range(len(op_samples("accept_drafts"))))
def test_samples(number: int) -> None:
    args = op_samples("accept_drafts", "cuda")[number]
    assert_equal(accept_drafts(*args), REFERENCE(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [8, 1000, 129280])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_results_are_the_references(count: int, vocabulary: int, dtype: torch.dtype) -> None:
    for seed in range(8):
        args = problem(12, count, vocabulary, dtype, seed)
        for proposal in (args[2], None):
            call = *args[:2], proposal, *args[3:]
            assert_equal(accept_drafts(*call), REFERENCE(*call))


def test_a_request_has_the_same_result_in_any_batch() -> None:
    args = problem(40, 5, 20_000)
    whole = accept_drafts(*args)
    for r in range(40):
        one = accept_drafts(args[0][r * 6 : r * 6 + 6], *(x[r : r + 1] for x in args[1:]))
        assert_equal(one, (whole[0][r : r + 1], whole[1][r : r + 1]))


def test_a_hundred_runs_give_the_same_and_a_replay_follows_its_inputs() -> None:
    args = problem(12, 5, 129280)
    want = accept_drafts(*args)
    for _ in range(100):
        assert_equal(accept_drafts(*args), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = accept_drafts(*args)
    for seed in range(1, 20):
        for value, new in zip(args, problem(12, 5, 129280, seed=seed), strict=True):
            value.copy_(new)
        graph.replay()
        assert_equal(captured, REFERENCE(*args))


def test_no_requests_and_many() -> None:
    for requests in (0, 300):
        args = problem(requests, 2, 500) if requests else op_samples("accept_drafts", "cuda")[5]
        assert_equal(accept_drafts(*args), REFERENCE(*args))
