"""`markov_drafts` on a GPU: logits of float64, drafts of its logits, repeats, capture, batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.drafts.markov_drafts import markov_drafts
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.drafts.distributions import NO_TOKEN, draw, likeliest_tokens, weights_of
from dsv4_compile.reference.drafts.random_numbers import PROPOSAL, uniform
from dsv4_compile.testing.samples import op_samples

MODELS = {"Flash": (129280, 256), "Pro": (129280, 512), "small": (1000, 40)}
"""Vocabulary and rank."""


def problem(requests: int, count: int, model: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Any]:
    vocabulary, rank = MODELS[model]
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    ids = torch.arange(requests, device="cuda")
    numbers = torch.zeros(requests, 4, dtype=torch.float64, device="cuda")
    numbers[:, 0] = torch.where(ids % 2 == 0, 0.0, 0.8)
    anchors = torch.randint(-1, vocabulary, (requests,), device="cuda", generator=generator)
    w1, w2 = ((randn(vocabulary, rank) * rank**-0.25).to(dtype) for _ in range(2))
    return [3 * randn(requests, count, vocabulary), anchors, w1, w2, numbers, ids * 7919 + seed, ids * 100]


def check(drafts: Tensor, logits: Tensor, args: list[Any]) -> None:
    """Compare logits with float64, given the drafts, and drafts with the choice from these logits."""
    base, anchors, w1, w2, numbers, seeds, positions = args
    previous = torch.cat((anchors[:, None], drafts[:, :-1]), 1)
    known = (previous >= 0) & (previous < len(w1))
    for j in range(drafts.shape[1]):
        bias = w1[previous[:, j].clamp(0, len(w1) - 1)].double() @ w2.double().t()
        want = base[:, j].double() + torch.where(known[:, j, None], bias, 0)
        torch.testing.assert_close(logits[:, j].double(), want, rtol=2e-6, atol=2e-5, equal_nan=True)
        likeliest = likeliest_tokens(logits[:, j])
        temperature = numbers[:, :1]
        greedy = temperature[:, 0] < 1e-30
        usable = torch.where((likeliest != NO_TOKEN)[:, None], logits[:, j], 0)
        weights = weights_of(usable, torch.where(temperature < 1e-30, 1, temperature))
        drawn = draw(weights, uniform(seeds, positions + j + 1, PROPOSAL), likeliest)
        token = torch.where(greedy | (likeliest == NO_TOKEN), likeliest, drawn)
        assert torch.equal(drafts[:, j], torch.where(known[:, j], token, NO_TOKEN))


@pytest.mark.parametrize("number", range(len(op_samples("markov_drafts"))))
def test_samples(number: int) -> None:
    args = op_samples("markov_drafts", "cuda")[number]
    drafts, logits = markov_drafts(*args)
    assert torch.equal(drafts, REFERENCES["markov_drafts"](*args)[0])
    check(drafts, logits, list(args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("requests", [1, 2, 17, 33])
def test_heads_of_the_models(requests: int, model: str, dtype: torch.dtype) -> None:
    args = problem(requests, 5, model, dtype)
    check(*markov_drafts(*args), args)


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    args = problem(40, 5, "small")
    drafts, logits = markov_drafts(*args)
    for r in (0, 1, 15, 16, 39):
        one = [x if i in (2, 3) else x[r : r + 1] for i, x in enumerate(args)]
        got = markov_drafts(*one)
        assert torch.equal(got[0], drafts[r : r + 1]) and torch.equal(got[1], logits[r : r + 1])


def test_a_hundred_runs_give_the_same_bits_and_a_replay_follows_its_inputs() -> None:
    args = problem(6, 5, "Flash")
    want = markov_drafts(*args)
    for _ in range(100):
        assert all(map(torch.equal, markov_drafts(*args), want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = markov_drafts(*args)
    for seed in range(1, 10):
        for value, new in zip(args, problem(6, 5, "Flash", seed=seed), strict=True):
            value.copy_(new)
        graph.replay()
        check(*captured, args)
