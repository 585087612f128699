"""Tests of threads that call one converted model, or compile at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, eager_logits, random_ids


def converted_model() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=256)


@pytest.fixture(scope="module")
def converted() -> Any:
    return converted_model()


def at_once(call: Callable[[int], Any], count: int) -> list[Any]:
    """Return the results of `call` for 0 to `count`, each run in a new thread."""
    got: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: call(i)})) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[i] for i in range(count)]


def test_two_threads_generate(original: Any, converted: Any) -> None:
    prompts = [random_ids(1, n) for n in (5, 17, 30)]
    got = at_once(lambda i: converted.generate(prompts[i], max_new_tokens=8, do_sample=False), len(prompts))
    for result, prompt in zip(got, prompts, strict=True):
        assert torch.equal(result, original.generate(prompt, max_new_tokens=8, do_sample=False))
    assert converted.model.dsv4_cache.holder is None


def test_a_call_while_something_else_compiles(original: Any) -> None:
    """torch says of all threads that they compile, while one does."""
    model, ids, results = converted_model(), random_ids(1, 9), list[Tensor]()
    attention = model.model.layers[1].self_attn

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        results.append(eager_logits(model, ids))
        attention.kv_proj.weight = nn.Parameter(attention.kv_proj.weight.roll(1, 0))
        results.append(eager_logits(model, ids))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    close(results[0], eager_logits(original, ids))
    with torch.no_grad():
        other = copy.deepcopy(original)
        weight = other.model.layers[1].self_attn.kv_proj.weight
        weight.copy_(weight.roll(1, 0))
    close(results[1], eager_logits(other, ids))


def test_first_calls_at_once() -> None:
    """All threads need the graph that one of them compiles."""
    torch.compiler.reset()
    original = tiny_model(num_hidden_layers=1, layer_types=LAYERS["layer_types"][:1])
    model = hf.convert(copy.deepcopy(original), max_batch_size=4, max_seq_len=256)
    model.compile(fullgraph=True, backend="dsv4", options={"fallback_by_default": True})
    prompts = [random_ids(1, n) for n in (5, 17, 30)]

    def call(i: int) -> Tensor:
        cache = hf.new_cache(model)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in (prompts[i][:, :-1], prompts[i][:, -1:])]
        return torch.cat(parts, 1)

    for got, prompt in zip(at_once(call, len(prompts)), prompts, strict=True):
        close(got, eager_logits(original, prompt))


def test_one_cache_in_two_threads_is_refused(converted: Any) -> None:
    cache = hf.new_cache(converted)
    cache.entered, cache.thread = True, 1
    with pytest.raises(ValueError, match=r"E208[\s\S]*another forward uses"):
        converted(random_ids(1, 3), past_key_values=cache)
    cache.entered = False
    converted(random_ids(1, 3), past_key_values=cache)
    assert not cache.entered
