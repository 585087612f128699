"""Tests of `generate`: a change by the caller's code between two steps takes effect in the next, as in transformers."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper

from dsv4_compile import hf
from dsv4_compile.hf.model.generate_call import Generation
from dsv4_compile.hf.model.model_snapshot import Snapshot
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids

CHANGE_AT, NEW = 3, 6
"""The call of the caller's code that changes the model, and tokens to generate."""


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model and its conversion."""
    original = tiny_model(**LAYERS)
    converted = hf.convert(copy.deepcopy(original), max_batch_size=1, max_seq_len=64, attention_only=False)
    return original, converted


class Changes:
    """Code of a caller that replaces a weight of the model when it is called for the third time."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == CHANGE_AT:
            mlp = self.model.model.layers[1].mlp
            mlp.shared_experts.up_proj.weight = nn.Parameter(mlp.shared_experts.up_proj.weight.data * 20)
        return args[1] if len(args) > 1 else None


class Streamer(TextStreamer):
    def __init__(self, change: Changes) -> None:
        self.change = change

    def put(self, value: Any) -> None:
        self.change()

    def end(self) -> None:
        pass


def stop(change: Changes) -> Callable[..., Any]:
    def never(ids: Any, scores: Any, **kwargs: Any) -> Any:
        change()
        return torch.zeros(len(ids), dtype=torch.bool)

    return never


def prefix(change: Changes) -> Callable[..., Any]:
    return lambda *args: change() or list(range(512))


def of_the_head(change: Changes) -> dict[str, Any]:
    change.model.lm_head.register_forward_hook(lambda *args: change())
    return {}


def of_the_instance(change: Changes) -> dict[str, Any]:
    update = change.model._update_model_kwargs_for_generation

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        change()
        return update(*args, **kwargs)

    change.model._update_model_kwargs_for_generation = types.MethodType(replaced, change.model)
    return {}


def of_a_subclass(change: Changes) -> dict[str, Any]:
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        change()
        return base._update_model_kwargs_for_generation(self, *args, **kwargs)

    base: Any = type(change.model)
    change.model.__class__ = type(base.__name__, (base,), {"_update_model_kwargs_for_generation": replaced})
    return {}


def of_all_modules(change: Changes) -> dict[str, Any]:
    head = change.model.lm_head
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *args: change() if module is head else None, always_call=True
    )
    return {"remove": handle.remove}


WAYS: dict[str, Callable[[Changes], dict[str, Any]]] = {
    "a logits processor": lambda c: {"logits_processor": [c]},
    "a list of logits processors": lambda c: {
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5), c])
    },
    "a function of a logits processor": lambda c: {
        "logits_processor": [PrefixConstrainedLogitsProcessor(prefix(c), 1)]
    },
    "allowed tokens": lambda c: {"prefix_allowed_tokens_fn": prefix(c)},
    "a criterion": lambda c: {"stopping_criteria": StoppingCriteriaList([stop(c)])},
    "a streamer": lambda c: {"streamer": Streamer(c)},
    "a hook": of_the_head,
    "a hook of all modules": of_all_modules,
    "a method of the instance": of_the_instance,
    "a method of a subclass": of_a_subclass,
}


def generate(model: Any, ids: Any, **options: Any) -> Any:
    remove = options.pop("remove", lambda: None)
    shape: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    try:
        found = model.generate(ids, **shape, output_logits=True, return_dict_in_generate=True, **options)
    finally:
        remove()
    return torch.stack(found.logits, 1)


@pytest.mark.parametrize("way", WAYS)
def test_code_of_the_caller_changes_the_next_step(pair: tuple[Any, Any], way: str) -> None:
    ids, found = random_ids(1, 9), []
    for model in map(copy.deepcopy, pair):
        change = Changes(model)
        found.append(generate(model, ids, **WAYS[way](change)))
        assert change.calls >= CHANGE_AT
    close(found[1], found[0])
    assert (found[0] - generate(pair[0], ids)).abs().max() > 0.1, "the change has no effect"


def log_comparisons(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    holds, run = Snapshot.holds, model.model.run_layers
    monkeypatch.setattr(Snapshot, "holds", lambda self: log.append("compare") or holds(self))
    monkeypatch.setitem(vars(model.model), "run_layers", lambda *a, **k: log.append("launch") or run(*a, **k))
    return log


def test_a_step_is_compared_after_the_launch_before_it(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = pair[1], random_ids(1, 9)
    generate(model, ids)
    log = log_comparisons(model, monkeypatch)
    generate(model, ids)
    assert log == ["compare", *["launch", "compare"] * NEW]
    log.clear()
    generate(model, ids, logits_processor=[lambda ids, scores: scores])
    assert log == ["compare", "launch"] * NEW


def test_a_change_by_another_thread_is_adopted_a_step_later(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = copy.deepcopy(pair[1]), random_ids(1, 9)
    generate(model, ids)
    change, ahead, adopted = Changes(model), Generation.compare_ahead, []
    compare = type(model.model).compare

    def then_change(self: Any, *args: Any) -> None:
        ahead(self, *args)
        change()  # at the worst time: what the next step needs has been compared

    monkeypatch.setattr(Generation, "compare_ahead", then_change)
    monkeypatch.setattr(type(model.model), "compare", lambda self: adopted.append(change.calls) or compare(self))
    generate(model, ids)
    assert adopted == [CHANGE_AT + 1]


def test_a_forward_inside_generate_compares_its_own_cache(pair: tuple[Any, Any]) -> None:
    original, converted = pair
    ids = random_ids(1, 9)
    options: dict[str, Any] = {"guidance_scale": 1.5, "negative_prompt_ids": random_ids(1, 4)}
    close(generate(converted, ids, **options), generate(original, ids, **options))
    one, other = (hf.new_cache(converted) for _ in range(2))
    converted(ids, past_key_values=one)
    generation = Generation(undisturbed=True)
    for cache, known in ((one, True), (other, False)):
        generation.compare_ahead(converted.model, one)
        assert generation.has_compared(converted.model, cache) is known
        assert not generation.has_compared(converted.model, cache), "once a comparison"
    generation.compare_ahead(converted.model, one)
    with mock.patch.dict(vars(converted.model), dsv4_snapshot=None):  # a thread failed to adopt the model
        assert not generation.has_compared(converted.model, one)


def test_a_later_call_compares_again(pair: tuple[Any, Any]) -> None:
    found, ids = [], random_ids(1, 9)
    for model in map(copy.deepcopy, pair):
        generate(model, ids)
        change = Changes(model)
        for _ in range(CHANGE_AT):
            change()
        found.append(generate(model, ids))
    close(found[1], found[0])
