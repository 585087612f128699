"""Tests of prompts with drafts in buckets: chunks of captured sizes give the tokens and drafts of whole prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.hf.model.draft_generate import STEPS, DraftSteps
from dsv4_compile.hf.model.draft_steps import PrefillStep
from dsv4_compile.hf.model.token_buckets import COMPILED_AS, CompiledAs, bucketed_call, why_exact
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.runtime import bucket_sizes
from tests.hf.small import LAYERS, random_ids

MAX_BATCH, MAX_SEQ_LEN, STEP = 3, 256, 90
Pair = tuple[Any, Any]


@pytest.fixture(scope="module", params=["dspark", "mtp"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Two models with drafts, eager: calls of the second run in buckets."""
    return tuple(drafting(request.param, **sizes) for sizes in ({}, {"max_step_tokens": STEP}))  # type: ignore[return-value]


def drafting(kind: str, **sizes: Any) -> Any:
    model = tiny_model(**LAYERS)
    drafts = tiny_drafts(model, kind, stages=1)
    hf.convert(model, max_batch_size=MAX_BATCH, max_seq_len=MAX_SEQ_LEN, drafts=drafts, **sizes)
    steps = model.__dict__[STEPS] = DraftSteps(model, None)
    if sizes:
        steps.prefill._compiled_call_impl = steps.prefill._call_impl
        steps.prefill.__dict__[COMPILED_AS] = CompiledAs(True, "")
    return model


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int]]:
    """Shape of the ids and number of rows of each chunk that runs in a bucket."""
    seen: list[tuple[tuple[int, ...], int]] = []
    forward = PrefillStep.forward

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("token_rows") is not None:
            seen.append((tuple(input_ids.shape), len(kwargs["limits"])))
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(PrefillStep, "forward", noted)
    return seen


def prompt(rows: int, columns: int, holes: bool) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, columns, dtype=torch.long)
    if holes:
        mask = (torch.rand(rows, columns) < 0.7).long()
        mask[:, -1] = 1
    return random_ids(rows, columns) * mask, mask


@torch.no_grad()
def test_first_tokens_and_drafts_are_those_of_whole_prompts(
    pair: Pair, shapes: list[tuple[tuple[int, ...], int]], seed: int
) -> None:
    rng, sizes = random.Random(seed), bucket_sizes.token_buckets(MAX_BATCH * STEP)
    calls = [(1, 1), (1, 64), (2, 130), (MAX_BATCH, 200)]
    calls += [(rng.randint(1, MAX_BATCH), rng.randint(1, 200)) for _ in range(4)]
    for number, (rows, columns) in enumerate(calls):
        ids, mask = prompt(rows, columns, bool(number % 2))
        numbers = torch.zeros(rows, 4, dtype=torch.float64)
        numbers[:, 2] = 1
        if number % 3 == 2:
            numbers[:, 0] = 0.7
        values = {"numbers": numbers, "seeds": torch.arange(rows) + 5, "limits": torch.full((rows,), MAX_SEQ_LEN)}
        results = []
        for model in pair:
            cache = hf.new_cache(model)
            cache.draft_caches = model.dsv4_drafts.new_caches(MAX_BATCH)
            options = {"input_ids": ids, "attention_mask": mask, "following": None, **values}
            results.append((*model.__dict__[STEPS].prefill(**options, past_key_values=cache), cache.seq_lens.clone()))
        (first, drafts, logits, lens), (want, want_drafts, want_logits, want_lens) = results[1], results[0]
        assert torch.equal(first, want) and torch.equal(lens, want_lens)
        assert torch.equal(drafts, want_drafts) and drafts.shape == (rows, pair[0].dsv4_drafts.num_drafts)
        torch.testing.assert_close(logits, want_logits, atol=2e-3, rtol=0)
    assert shapes and {ids[0] for ids, _ in shapes} == {1} and {ids[1] for ids, _ in shapes} <= set(sizes)
    assert {rows for _, rows in shapes} == {MAX_BATCH}  # one graph for all batches


def test_generate_has_the_text_and_the_acceptance_of_exact_sizes(
    pair: Pair, shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    for rows, columns, chunk in ((1, 5, None), (3, 130, 61), (2, 3, 1)):
        ids, mask = prompt(rows, columns, holes=rows > 1)
        more = {} if chunk is None else {"prefill_chunk_size": chunk}
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **more}
        del shapes[:]
        got, want = pair[1].generate(ids, **options), pair[0].generate(ids, **options)
        assert torch.equal(got, want) and shapes
        assert pair[1].draft_statistics == pair[0].draft_statistics
        assert torch.equal(want, pair[0].generate(ids, drafts=False, **options))


def test_a_cache_goes_on_after_a_generation_in_buckets(pair: Pair) -> None:
    """The columns that `generate` appends at its end, with the known token after them, run in buckets too."""
    ids, texts = random_ids(2, 40), []
    for model in pair:
        cache = hf.new_cache(model)
        first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, past_key_values=cache)
        longer = torch.cat((first, ids[:, :9]), 1)
        mask = torch.ones_like(longer)
        texts.append(model.generate(longer, attention_mask=mask, max_new_tokens=5, past_key_values=cache))
    assert torch.equal(*texts)


def test_only_prompts_run_in_buckets(pair: Pair) -> None:
    steps, ids = pair[1].__dict__[STEPS], random_ids(2, 6)
    values = {"numbers": torch.zeros(2, 4), "seeds": ids[:, 0], "limits": ids[:, 0], "following": None}
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **values}
    assert not why_exact(steps.prefill, pair[1].config, arguments)
    assert (
        why_exact(steps.verify, pair[1].config, {**arguments, "drafts": ids}) == "with drafts, limits, numbers, seeds"
    )
    cache = hf.new_cache(pair[1])
    longer = {**arguments, "input_ids": random_ids(2, 95), "attention_mask": None}
    step = bucketed_call(steps.prefill, longer, cache)._steps[0]
    assert step.arguments["following"].shape == (MAX_BATCH,) and step.captured
