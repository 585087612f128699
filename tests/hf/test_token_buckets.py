"""Tests of calls in buckets: results, caches and counters are those of the same calls without padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.hf.model.token_buckets import COMPILED_AS, CompiledAs, bucketed_call
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime import bucket_sizes
from tests.hf.small import LAYERS, close, logits, random_ids

MAX_BATCH, MAX_SEQ_LEN, STEP = 5, 256, 90


def converted(**sizes: Any) -> Any:
    sizes = {"max_batch_size": MAX_BATCH, "max_seq_len": MAX_SEQ_LEN, **sizes}
    return hf.convert(tiny_model(**LAYERS), **sizes)


@pytest.fixture(scope="module")
def exact() -> Any:
    return converted()


@pytest.fixture(scope="module")
def bucketed() -> Any:
    """A model with calls in buckets, and eager."""
    return in_buckets(converted(max_step_tokens=STEP))


def in_buckets(model: Any) -> Any:
    for module in (model, model.model):
        module._compiled_call_impl = module._call_impl
        module.__dict__[COMPILED_AS] = CompiledAs(True, "")
    return model


@pytest.fixture
def steps(bucketed: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the ids that reach the decoder stack."""
    shapes: list[tuple[int, ...]] = []
    kind = type(bucketed.model)
    forward = kind.forward

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is bucketed.model:
            shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", noted)
    return shapes


def random_mask(rows: int, columns: int) -> Tensor:
    mask = torch.rand(rows, columns) < 0.7
    mask[:, -1] = True
    return mask.long()


def test_a_storm_of_prompts_and_steps_is_as_without_buckets(
    exact: Any, bucketed: Any, steps: list[tuple[int, ...]]
) -> None:
    rng = random.Random(3)
    sizes = bucket_sizes.token_buckets(MAX_BATCH * STEP)
    for _ in range(12):
        rows = rng.randint(1, MAX_BATCH)
        ours, theirs = hf.new_cache(bucketed), hf.new_cache(exact)
        for columns in (rng.randint(1, 150), 1, rng.randint(2, 40), 1):
            ids, mask = random_ids(rows, columns), random_mask(rows, columns) if rng.random() < 0.7 else None
            keep = rng.choice([0, 1, 3, columns + 4])
            more = {"attention_mask": mask, "logits_to_keep": keep}
            got = logits(bucketed, ids, past_key_values=ours, **more)
            want = logits(exact, ids, past_key_values=theirs, **more)
            assert got.shape == want.shape
            known = torch.ones_like(ids) if mask is None else mask
            shown = known[:, -keep:] != 0
            close(got[shown], want[shown])
            assert torch.equal(ours.seq_lens, theirs.seq_lens)
            assert ours.get_seq_length() == theirs.get_seq_length()
    assert all(columns == 1 or (rows == 1 and columns in sizes) for rows, columns in steps)
    assert len({shape for shape in steps if shape[1] > 1}) > 3


def test_caches_have_the_rows_of_calls_without_buckets(exact: Any, bucketed: Any) -> None:
    ids, mask = random_ids(3, 70), random_mask(3, 70)
    other = in_buckets(converted())
    caches = [hf.new_cache(model) for model in (exact, other)]
    for model, cache in zip((exact, other), caches, strict=True):
        logits(model, ids, attention_mask=mask, past_key_values=cache)
        logits(model, ids[:, :1], past_key_values=cache)
    for ours, theirs in zip(caches[1].paged.layers, caches[0].paged.layers, strict=True):
        for name, tensor in ours.tensors().items():
            torch.testing.assert_close(tensor, theirs.tensors()[name], atol=2e-4, rtol=0, equal_nan=True)


def test_generate_gives_the_tokens_of_eager(bucketed: Any) -> None:
    ids, mask = random_ids(3, 130), torch.ones(3, 130, dtype=torch.long)
    mask[0, :57] = mask[2, :129] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    want = [
        tiny_model(**LAYERS).generate(row[None, kept != 0], attention_mask=kept[None, kept != 0], **options)[0, -6:]
        for row, kept in zip(ids, mask, strict=True)
    ]
    for chunk in (None, 33):
        got = bucketed.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **options)
        assert torch.equal(got[:, -6:], torch.stack(want))


def test_the_decoder_stack_alone_returns_the_vectors_of_each_token(exact: Any, bucketed: Any) -> None:
    ids = random_ids(2, 100)
    with torch.no_grad():
        got, want = bucketed.model(ids).last_hidden_state, exact.model(ids).last_hidden_state
    close(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": True},
        {"output_router_logits": True},
        {"labels": torch.ones(2, 20, dtype=torch.long)},
        {"logits_to_keep": torch.tensor([3, 7])},
        {"return_dict": False},
    ],
    ids=str,
)
def test_calls_that_show_more_than_logits_run_in_their_size(
    options: dict[str, Any], exact: Any, bucketed: Any, steps: list[tuple[int, ...]]
) -> None:
    ids = random_ids(2, 20)
    with torch.no_grad():
        got, want = bucketed(ids, **options), exact(ids, **options)
    assert steps[-1] == (2, 20)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else ((got[n], want[n]) for n in want)
    for ours, theirs in pairs:
        if isinstance(theirs, Tensor):
            close(ours, theirs)


def test_hooks_see_the_shape_of_the_call(bucketed: Any, exact: Any, steps: list[tuple[int, ...]]) -> None:
    ids, shapes = random_ids(2, 20), []
    for place in (bucketed, bucketed.lm_head, bucketed.model.layers[1], bucketed.model.layers[0].mlp):
        hook = place.register_forward_hook(lambda module, args, out: shapes.append(1))
        close(logits(bucketed, ids), logits(exact, ids))
        assert steps[-1] == (2, 20)
        with pytest.raises(ValueError, match="E204"):
            logits(bucketed, random_ids(1, STEP + 1))
        hook.remove()
    assert len(shapes) == 4
    close(logits(bucketed, ids), logits(exact, ids))
    assert steps[-1] == (1, 64)


def test_a_call_that_fits_no_cache_is_refused_and_leaves_it(bucketed: Any) -> None:
    cache = hf.new_cache(bucketed)
    logits(bucketed, random_ids(2, 200), past_key_values=cache)
    for ids in (random_ids(2, 57), random_ids(1, 3), random_ids(MAX_BATCH + 1, 2)):
        with pytest.raises(ValueError, match=r"E20[48]"):
            logits(bucketed, ids, past_key_values=cache)
    assert cache.get_seq_length() == 200 and cache.seq_lens.tolist() == [200, 200, 0, 0, 0]
    assert logits(bucketed, random_ids(2, 56), past_key_values=cache).shape[1] == 56


@pytest.mark.parametrize("most", [1, 2, 16, 17, 63, 64, 65, 500, 4096, 8192])
def test_padding_costs_at_most_a_quarter(most: int) -> None:
    sizes = bucket_sizes.token_buckets(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes)) and len(sizes) <= 18
    assert {2**power for power in range(6, 14) if 2**power <= most} <= set(sizes)
    least = 1
    for size in sizes:
        assert size + bucket_sizes.RIDGE <= 1.25 * (least + bucket_sizes.RIDGE)
        least = size + 1
    batches, least = bucket_sizes.request_buckets(most), 1
    for size in batches:
        assert size == least or size <= 1.25 * least
        least = size + 1
    assert batches[-1] == most


def test_the_steps_of_a_prompt_are_known_before_it_runs(bucketed: Any) -> None:
    cache, most = hf.new_cache(bucketed), bucket_sizes.chunk_tokens(MAX_BATCH, STEP)
    for rows, columns in ((1, 2), (1, 64), (1, 65), (2, 100), (3, 61), (MAX_BATCH, 90)):
        steps = bucketed_call(bucketed, {"input_ids": random_ids(rows, columns)}, cache)._steps
        assert tuple(step.tokens for step in steps) == bucket_sizes.prompt_steps(rows, columns, most, STEP)


def test_chunks_of_the_default_size_cost_little_more_than_one_step() -> None:
    """By floors: each chunk reads all experts again."""
    cost, most = bucket_sizes.chunk_cost, bucket_sizes.MOST_TOKENS
    assert most == bucket_sizes.chunk_tokens(8, 32768) == bucket_sizes.chunk_tokens(1, 8192)
    assert cost(8192, most) == 1 and cost(8192, 2048) == pytest.approx(1.86, abs=0.01)
    costs = [cost(32768, size) for size in (512, 2048, most, 2 * most, 32768)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < 1.3 and costs[2] / costs[3] < 1.2  # chunks of twice the size save a seventh
    for tokens in (1, 300, most, most + 1, 5 * most):
        steps = bucket_sizes.prompt_steps(1, tokens, most)
        assert sum(steps[:-1]) < tokens <= sum(steps) and set(steps[:-1]) <= {most}
    assert bucket_sizes.prompt_steps(3, 100, 64) == (64, 64, 64, 64, 64)  # 21 columns of 3 rows, then 16
