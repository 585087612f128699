"""Tests of the comparisons in a call of a converted model: none twice, and all after a change."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, random_ids


def convert(attention_only: bool) -> Any:
    model = hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=64, attention_only=attention_only)
    model(random_ids(1, 3))
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "attention"])
def called(request: pytest.FixtureRequest) -> Any:
    """A converted model that has run."""
    return convert(request.param)


class Compared(Exception):
    """Raised in place of a comparison."""


def compares(model: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    def compare(self: Any) -> None:
        raise Compared

    with monkeypatch.context() as patched:
        patched.setattr(type(model.model), "compare", compare)
        try:
            model(random_ids(1, 3))
        except Compared:
            return True
    return False


def replace(owner: Any, name: str) -> None:
    setattr(owner, name, nn.Parameter(getattr(owner, name).data.clone()))


def move(owner: Any, name: str) -> None:
    getattr(owner, name).data = getattr(owner, name).data.clone()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: replace(m.layers[1].self_attn.q_a_proj, "weight"),
    "its data": lambda m: move(m.layers[0].self_attn, "sinks"),
    "a hook": lambda m: m.layers[0].self_attn.kv_proj.register_forward_hook(lambda *a: None),
    "a hook before": lambda m: m.layers[0].self_attn.kv_proj.register_forward_pre_hook(lambda *a: None),
    "a forward": lambda m: setattr(m.layers[0].self_attn.kv_proj, "forward", lambda x: x),
    "a class": lambda m: setattr(m.layers[1].mlp, "__class__", type("Other", (type(m.layers[1].mlp),), {})),
    "an adapter": lambda m: m.layers[0].self_attn.kv_proj.add_module("base_layer", nn.Identity()),
    "a parametrisation": lambda m: parametrize.register_parametrization(
        m.layers[0].self_attn.kv_proj, "weight", nn.Identity()
    ),
    "a linear": lambda m: setattr(m.layers[0].self_attn, "kv_proj", nn.Linear(2, 2)),
    "an attention": lambda m: setattr(m.layers[0], "self_attn", nn.Identity()),
    "a layer": lambda m: m.layers.__setitem__(0, copy.deepcopy(m.layers[1])),
    "a further layer": lambda m: m.layers.append(nn.Identity()),
    "an epsilon": lambda m: setattr(m.layers[0].self_attn.q_a_norm, "variance_epsilon", 1e-3),
    "the configuration": lambda m: setattr(m.config, "sliding_window", 7),
    "frequencies": lambda m: m.rotary_emb.main_inv_freq.mul_(2),
}
PAST_TORCH: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: dict.__setitem__(
        m.layers[0].self_attn.kv_proj._parameters, "weight", nn.Parameter(torch.ones(64, 128))
    ),
    "a module": lambda m: m.layers[1].self_attn._modules.update(kv_proj=nn.Linear(2, 2)),
    "a hook": lambda m: m.layers[0].self_attn.kv_proj._forward_hooks.update({7: lambda *a: None}),
    "a buffer": lambda m: m.rotary_emb._buffers.update(main_inv_freq=m.rotary_emb.main_inv_freq * 2),
    "a number": lambda m: vars(m.layers[0].self_attn.q_a_norm).update(variance_epsilon=1e-3),
    "a forward": lambda m: vars(m.layers[0].self_attn.kv_proj).update(forward=lambda x: x),
    "the configuration": lambda m: vars(m.config).update(sliding_window=7),
    "a layer that is gone": lambda m: m.layers._modules.pop("1"),
    "a class": lambda m: object.__setattr__(m.norm, "__class__", type("Other", (type(m.norm),), {})),
    "a layout": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data.as_strided((64,), (2,))),
}
"""Changes that no hook and no `__setattr__` sees."""
AROUND: dict[str, Callable[[Any], Any]] = {
    "a shared expert": lambda m: replace(m.layers[1].mlp.shared_experts.up_proj, "weight"),
    "its data": lambda m: move(m.layers[1].mlp.shared_experts.gate_proj, "weight"),
    "a hook of the experts": lambda m: m.layers[0].mlp.experts.register_forward_hook(lambda *a: None),
    "a hook of the norm": lambda m: m.norm.register_forward_hook(lambda *a: None),
    "the embedding": lambda m: setattr(m, "embed_tokens", nn.Embedding(600, 128)),
    "the table": lambda m: setattr(m.layers[0].mlp.gate, "tid2eid", m.layers[0].mlp.gate.tid2eid[:9]),
    "the activation": lambda m: setattr(m.layers[0].mlp.experts, "act_fn", nn.GELU()),
    "an epsilon": lambda m: setattr(m.layers[0].input_layernorm, "variance_epsilon", 1e-3),
}


def test_nothing_is_compared_twice(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compares(called, monkeypatch)


@pytest.mark.parametrize(
    "change", [*CHANGES.values(), *PAST_TORCH.values()], ids=[*CHANGES, *map("raw {}".format, PAST_TORCH)]
)
def test_a_change_is_compared(called: Any, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(called)
    model(random_ids(1, 3))
    with torch.no_grad():
        change(model.model)
    assert compares(model, monkeypatch)


@pytest.mark.parametrize("what", AROUND)
def test_a_change_around_attention_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(attention_only=False)
    AROUND[what](model.model)
    assert compares(model, monkeypatch)


def test_what_no_comparison_depends_on_is_not_compared(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(called)
    assert compares(model, monkeypatch), "a copy has not been compared"
    model(random_ids(1, 3))
    model.lm_head.register_forward_hook(lambda *a: None)
    model.model.layers[1].self_attn.kv_proj.weight.data.mul_(2)
    assert not compares(model, monkeypatch)


def test_a_model_forgets_what_it_compared_when_it_is_reverted(called: Any) -> None:
    model = hf.revert(copy.deepcopy(called))
    assert not [name for name in vars(model.model) if name.startswith("dsv4")]


def test_threads_compare_a_changed_model_one_at_a_time_and_once(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that adopt a weight at once would stack it twice, and one would run with a matrix that the other drops."""
    adopting: list[int] = []
    compare = type(called.model).compare

    def slow(model: Any) -> None:
        adopting.append(threading.get_ident())
        time.sleep(0.2)
        compare(model)
        assert adopting[-1] == threading.get_ident(), "another thread began meanwhile"

    replace(called.model.layers[0].self_attn.q_b_proj, "weight")
    monkeypatch.setattr(type(called.model), "compare", slow)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(called, random_ids(1, 3)) for _ in range(2)]
        assert all(call.result().logits.isfinite().all() for call in calls)
    assert len(adopting) == 1
