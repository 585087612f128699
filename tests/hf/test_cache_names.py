"""Tests of the cache's name, which transformers 5.24 has changed: code written for either version runs with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import modeling_outputs

from dsv4_compile import hf
from dsv4_compile._compat import CACHE_NAMES, check_transformers
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids


@pytest.fixture(scope="module")
def converted() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=2, max_seq_len=256)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_by_either_name_is_continued_and_returned(converted: Any, name: str) -> None:
    ids, cache = random_ids(1, 30), hf.new_cache(converted)
    want = converted(ids).logits
    first = converted(ids[:, :20], **{name: cache})
    inputs = converted.prepare_inputs_for_generation(ids[:, 20:25], **{name: cache})
    parts = [first.logits, converted(**inputs).logits, converted(ids[:, 25:], **{name: first[CACHE_NAME]}).logits]
    close(torch.cat(parts, dim=1), want)
    assert first[CACHE_NAME] is inputs[CACHE_NAME] is cache
    cache.reset()
    converted.model(ids[:, :20], **{name: cache})
    assert converted.model(ids[:, 20:], **{name: cache})[CACHE_NAME].get_seq_length() == 30


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_generate_continues_a_cache_by_either_name(converted: Any, name: str) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    cache, prompt = hf.new_cache(converted), random_ids(1, 20)
    first = converted.generate(prompt, **{name: cache}, **options)
    assert first[CACHE_NAME] is cache and cache.get_seq_length() == 25
    turn = torch.cat((first.sequences, random_ids(1, 4)), dim=1)
    second = converted.generate(turn, **{name: cache}, **options)
    assert torch.equal(second.sequences, converted.generate(turn, **options).sequences)
    assert cache.get_seq_length() == 35


def test_both_names_in_one_call_are_refused(converted: Any) -> None:
    ids, both = random_ids(1, 3), {name: hf.new_cache(converted) for name in CACHE_NAMES}
    calls: tuple[Callable[..., Any], ...] = (
        converted,
        converted.model,
        converted.generate,
        converted.prepare_inputs_for_generation,
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"E208[\s\S]*cache and past_key_values"):
            call(ids, **both)


def test_a_transformers_with_a_name_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model would ignore our cache, and give other tokens without an error."""
    renamed = dataclasses.make_dataclass("MoeModelOutputWithPast", ["last_hidden_state", "kv_state"])
    monkeypatch.setattr(modeling_outputs, "MoeModelOutputWithPast", renamed)
    found = rf"MoeModelOutputWithPast has last_hidden_state, kv_state[\s\S]*{CACHE_NAME}[\s\S]*transformers>=5.17,<5.25"
    with pytest.raises(ValueError, match=rf"E208[\s\S]*{found}"):
        hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=128)


def test_a_transformers_that_renames_by_halves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (other,) = set(CACHE_NAMES) - {CACHE_NAME}
    renamed = dataclasses.make_dataclass("MoeCausalLMOutputWithPast", ["logits", other])
    monkeypatch.setattr(modeling_outputs, "MoeCausalLMOutputWithPast", renamed)
    found = rf"DeepseekV4Model.forward has {CACHE_NAME};[\s\S]*MoeCausalLMOutputWithPast has {other};"
    with pytest.raises(ValueError, match=rf"E208[\s\S]*{found}"):
        check_transformers()
