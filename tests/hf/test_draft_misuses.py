"""Tests of calls with drafts that callers of transformers make, other than plain ones; nothing is compiled."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import quiet_libraries, tiny_drafts, tiny_model
from tests.hf.small import LAYERS
from tests.support.draft_sources import Forced

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 256}
IDS = torch.randint(1, 512, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    """A converted model whose drafts are all accepted."""
    quiet_libraries()
    model = hf.convert(tiny_model(**LAYERS), **SIZES)
    text = greedy(model, IDS, max_new_tokens=80)
    model.__dict__["dsv4_drafts"] = Forced(text, lambda lengths: torch.full_like(lengths, 5))
    return model


@pytest.fixture(params=["dspark", "mtp"])
def attached(request: pytest.FixtureRequest) -> Any:
    """A converted model with random draft layers of a kind."""
    target = tiny_model(**LAYERS)
    return hf.convert(target, drafts=tiny_drafts(target, request.param), **SIZES)


def greedy(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, **options})


class Streamer:
    """Streamer of one row that raises at some number of tokens."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens = most, []

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()
        if len(self.tokens) >= self.most:
            raise KeyboardInterrupt

    def end(self) -> None: ...


class Raises(StoppingCriteria):
    """Criterion that raises at some number of columns."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] == self.columns:
            raise KeyError(self.columns)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("columns", [21, 23, 26])
def test_a_streamer_that_raises_leaves_the_cache_at_the_tokens_that_it_saw(columns: int, model: Any) -> None:
    cache, streamer = hf.new_cache(model), Streamer(columns)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, IDS[:1], past_key_values=cache, streamer=streamer)
    assert cache.get_seq_length() == columns - 1 and cache.seq_lens.tolist() == [columns - 1, 0, 0, 0]
    more = torch.cat((torch.tensor([streamer.tokens]), torch.full((1, 9), 3)), 1)
    assert torch.equal(greedy(model, more, past_key_values=cache), greedy(model, more, drafts=False))


@pytest.mark.parametrize("eos", [False, True])
def test_a_criterion_that_raises_leaves_the_cache_at_the_columns_that_it_saw(eos: bool, model: Any) -> None:
    text, cache = greedy(model, IDS, drafts=False), hf.new_cache(model)
    options = {"eos_token_id": int(text[1, 21]), "pad_token_id": 0} if eos else {}
    with pytest.raises(KeyError):
        greedy(model, IDS, past_key_values=cache, stopping_criteria=StoppingCriteriaList([Raises(25)]), **options)
    seen = text[:, :25].clone()
    if eos:
        seen[1, 22:] = 0
    assert cache.get_seq_length() == 24 and cache.seq_lens.tolist() == [24, 24, 0, 0]
    more = torch.cat((seen, torch.full((2, 9), 3)), 1)
    options = {"attention_mask": torch.ones_like(more)}
    want = greedy(model, more, drafts=False, **options)
    assert torch.equal(greedy(model, more, past_key_values=cache, **options), want)


def test_a_length_criterion_beyond_the_cache_is_refused_at_its_end(model: Any) -> None:
    """A criterion of the caller takes the place of that of `max_new_tokens`, which has been checked."""
    cache = hf.new_cache(model, max_seq_len=256, max_batch_size=2)
    beyond = StoppingCriteriaList([MaxLengthCriteria(400)])
    with pytest.raises(DSV4Error, match="E204"):
        greedy(model, IDS[:, :1].expand(2, 240), past_key_values=cache, max_new_tokens=3, stopping_criteria=beyond)


def test_prompts_of_int32_are_taken(model: Any) -> None:
    assert torch.equal(greedy(model, IDS.int()), greedy(model, IDS, drafts=False))


@pytest.mark.parametrize("value", [0, 1, "off"])
def test_drafts_is_true_or_false(value: Any, model: Any) -> None:
    with pytest.raises(DSV4Error, match="drafts="):
        greedy(model, IDS, drafts=value)


def test_caches_of_drafts_serve_calls_in_and_out_of_inference_mode(attached: Any) -> None:
    cache = hf.new_cache(attached)
    with torch.inference_mode():
        greedy(attached, IDS)
        first = greedy(attached, IDS, past_key_values=cache)
    more = torch.cat((first.clone(), IDS[:, :3]), 1)
    want = greedy(attached, more, drafts=False)
    assert torch.equal(greedy(attached, more, past_key_values=cache), want)
    assert torch.equal(greedy(attached, more), want) and attached.draft_statistics is not None


def test_a_model_that_is_cast_after_a_call_drafts_on(attached: Any) -> None:
    greedy(attached, IDS, max_new_tokens=3)
    attached.to(torch.bfloat16)
    assert torch.equal(greedy(attached, IDS), greedy(attached, IDS, drafts=False))
    greedy(attached, IDS, max_new_tokens=3)
    assert attached.draft_statistics is not None


def test_a_cache_of_an_earlier_conversion_takes_other_drafts(attached: Any) -> None:
    cache = hf.new_cache(attached)
    want = greedy(attached, IDS, past_key_values=cache)
    cache.reset()
    other = "mtp" if attached.dsv4_drafts.kind == "dspark" else "dspark"
    hf.convert(hf.revert(attached), drafts=tiny_drafts(attached, other), **SIZES)
    assert torch.equal(greedy(attached, IDS, past_key_values=cache), want)
    assert attached.draft_statistics is not None


def test_revert_frees_draft_layers_and_the_steps_that_call_them(attached: Any) -> None:
    greedy(attached, IDS, max_new_tokens=3)
    drafts = weakref.ref(attached.dsv4_drafts)
    hf.revert(attached)
    gc.collect()
    assert drafts() is None and not [name for name in vars(attached) if "dsv4" in name]


def test_a_resized_vocabulary_is_refused_with_dspark_in_words() -> None:
    target = tiny_model(**LAYERS)
    model = hf.convert(target, drafts=tiny_drafts(target), **SIZES)
    model.resize_token_embeddings(500)
    with pytest.raises(DSV4Error, match="a head of 500 tokens"):
        greedy(model, IDS % 500)
    assert greedy(model, IDS % 500, drafts=False).shape == (2, 28)


CALLS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "same": lambda model: model}


@pytest.mark.parametrize("how", CALLS)
def test_nan_in_draft_weights_changes_no_text(how: str, attached: Any) -> None:
    want = greedy(attached, IDS)
    model = CALLS[how](attached)
    for parameter in model.dsv4_drafts.parameters():
        parameter.data.fill_(float("nan"))
    assert torch.equal(greedy(model, IDS), want) and model.draft_statistics.tokens_per_step == 1


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("inside", ["made", "stepped"])
def test_a_running_batch_serves_in_and_out_of_inference_mode(inside: str, drafts: bool, attached: Any) -> None:
    want = greedy(attached, IDS[:1], drafts=False)[0, 20:].tolist()
    with torch.inference_mode(inside == "made"):
        batch = hf.RunningBatch(attached, slots=2, prefill_chunk=16, drafts=drafts)
    request = batch.submit(IDS[0], max_new_tokens=8)
    with torch.inference_mode():
        batch.step()
        batch.step()
    batch.run()
    assert request.tokens == want
