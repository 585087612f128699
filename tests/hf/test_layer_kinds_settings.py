"""Tests of layers with settings, classes and functions of the caller: a trace of one does not stand for others."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsv4_compile import hf
from dsv4_compile.hf.model.layer_kinds import _kind
from dsv4_compile.hf.model.redundant_guards import watched
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from tests.hf.small import close, logits, random_ids
from tests.hf.test_layer_kinds import ALIKE, CHANGES, PAIRS, SAME_KIND, TYPES, change, compiled
from tests.hf.test_redundant_guards import own_forward, twice


@pytest.fixture(scope="module")
def pairs() -> Any:
    return hf.convert(tiny_model(**PAIRS), max_batch_size=1, max_seq_len=16)


@pytest.fixture(scope="module")
def alike() -> Any:
    return hf.convert(tiny_model(**ALIKE), max_batch_size=1, max_seq_len=16)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_changed_layer_has_another_kind_or_hands_its_tensors_over(what: str, index: int, alike: Any) -> None:
    watched.update(("top_k", "hc_eps"))  # as a trace of a layer does
    model, stack = copy.deepcopy(alike), alike.model
    model.model.adopt()
    stack.adopt()
    assert (model.model.dsv4_state, model.model.dsv4_repeated.layers) == (stack.dsv4_state, (1,))
    change(model, index, what)
    model.model.adopt()
    same = what in SAME_KIND
    assert (model.model.dsv4_state == stack.dsv4_state) is same
    assert model.model.dsv4_repeated.layers == ((1,) if same else ())
    if same and index:
        held = {id(tensor) for tensor in model.model.dsv4_repeated.weights}
        assert all(id(t) in held for name, t in model.model.dsv4_parameters.items() if name.startswith("layers.1."))


class Note:
    """An object with a setting, a method and a property."""

    def __init__(self) -> None:
        self.factor = 1.0

    def read(self) -> float:
        return self.factor


class Level(enum.Enum):
    LOW = 1.0
    HIGH = 5.0


@dataclass(frozen=True)
class Frozen:
    factor: float


def by_default(factor: float = 1.0) -> float:
    return factor


UNDESCRIBED: dict[str, Any] = {
    "a list": [1.0],
    "a dict": {"factor": 1.0},
    "a set": {1.0},
    "a tuple": (1.0,),
    "a dataclass": Frozen(1.0),
    "an enum": Level.LOW,
    "an object": Note(),
    "a function": by_default,
    "a partial": partial(by_default, 1.0),
    "a bound method": Note().read,
    "an array": np.ones(1),
    "a list of tensors": [torch.ones(1)],
    "a class": Note,
}


@pytest.mark.parametrize("what", UNDESCRIBED)
@pytest.mark.parametrize("path", ["self_attn", "mlp.gate", "input_layernorm", "self_attn.kv_proj"])
def test_a_layer_with_a_setting_that_no_text_describes_has_no_kind(what: str, path: str, pairs: Any) -> None:
    layer = pairs.model.layers[2]
    module = layer.get_submodule(path)
    assert _kind(layer, {id(pairs.config): "config"})[0]
    module.note = UNDESCRIBED[what]
    try:
        assert not _kind(layer, {id(pairs.config): "config"})[0]
    finally:
        del module.note


def own_class(module: Any) -> None:
    module.__class__ = type("Alike", (type(module),), {"__module__": "tests"})


NO_KIND: dict[str, Callable[[Any], Any]] = {
    "a class of the attention": lambda layer: own_class(layer.self_attn),
    "a class of a norm": lambda layer: own_class(layer.input_layernorm),
    "a class of the layer": own_class,
    "a module of the caller's": lambda layer: layer.add_module("probe", Probe()),
    "a hook": lambda layer: layer.mlp.register_forward_hook(twice),
    "another configuration": lambda layer: setattr(layer.mlp.experts, "config", tiny_config()),
    "a forward": lambda layer: own_forward(layer.mlp),
}


class Probe(nn.Module):
    pass


@pytest.mark.parametrize("what", NO_KIND)
def test_a_layer_with_code_of_the_caller_has_no_kind(what: str, pairs: Any) -> None:
    model = copy.deepcopy(pairs)
    NO_KIND[what](model.model.layers[2])
    kinds = [bool(_kind(layer, {id(model.config): "config"})[0]) for layer in model.model.layers]
    assert kinds == [True, True, False, True]


def test_with_a_hook_of_all_modules_no_layer_has_a_kind(pairs: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(twice)
    try:
        assert not any(_kind(layer, {id(pairs.config): "config"})[0] for layer in pairs.model.layers)
    finally:
        handle.remove()


def test_a_forward_that_is_patched_into_a_class(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pairs.model.layers[0].mlp), "forward", lambda self, x, **kwargs: x)
    assert not _kind(pairs.model.layers[0], {id(pairs.config): "config"})[0]


class Scaled:
    """An attention that a caller writes: scaled by the result of `factor`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)  # type: ignore[misc]
        return out * self.factor(), weights  # type: ignore[attr-defined]


class ByTable(Scaled):
    def factor(self) -> Any:
        return self.table["factors"][0]  # type: ignore[attr-defined]


class ByTensor(Scaled):
    def factor(self) -> Any:
        return self.scale  # type: ignore[attr-defined]


DEPTHS = [1.0, 1.0, 1.0]


class ByDepth(Scaled):
    def factor(self) -> Any:
        return DEPTHS[self.layer_idx]  # type: ignore[attr-defined]


WRITTEN: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    ByTable: (
        lambda attention: setattr(attention, "table", {"factors": [1.0]}),
        lambda attention: attention.table["factors"].__setitem__(0, 5.0),
    ),
    ByTensor: (
        lambda attention: setattr(attention, "scale", torch.ones(())),
        lambda attention: setattr(attention, "scale", torch.full((), 5.0)),
    ),
    ByDepth: (lambda attention: None, lambda attention: DEPTHS.__setitem__(2, 5.0)),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_forward_of_the_caller_reads_is_compared(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEPTHS", [1.0, 1.0, 1.0])
    ids, (prepare, change) = random_ids(1, 12), WRITTEN[kind]
    layers = {"num_hidden_layers": 3, "layer_types": [TYPES[0]] * 3, "num_hash_layers": 0}
    eager = hf.convert(tiny_model(**layers), max_batch_size=1, max_seq_len=32)
    written = type(kind.__name__, (kind, type(eager.model.layers[0].self_attn)), {})
    for layer in eager.model.layers:
        layer.self_attn.__class__ = written
        prepare(layer.self_attn)
    model = copy.deepcopy(eager)
    compiled(model)
    before = logits(model, ids)
    close(before, logits(eager, ids))
    logits(model, ids)  # compares all again, since the first call watched more names
    for each in (model,) if kind is ByDepth else (model, eager):
        change(each.model.layers[2].self_attn)
    want = logits(eager, ids)
    close(logits(model, ids), want)
    assert not torch.allclose(before, want, atol=1e-3)
