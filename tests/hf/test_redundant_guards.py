"""Tests of graphs without guards for modules, settings and weights: each change that they guarded is noticed."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from dsv4_compile._compat import counters, dynamo_config
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.model import redundant_guards as guards
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from dsv4_compile.options import mode_settings
from dsv4_compile.runtime import counting
from tests.hf.small import close, random_ids

IDS = torch.arange(3, 12)[None]
ONE: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": tiny_config().layer_types[1:2], "num_hash_layers": 0}
"""One layer, as tracing time grows with the layers."""


def converted_model(**options: Any) -> Any:
    return hf.convert(tiny_model(**ONE), max_batch_size=2, max_seq_len=64, **options)


@pytest.fixture(scope="module")
def converted() -> Iterator[Any]:
    with dynamo_config.patch(recompile_limit=64):
        yield converted_model()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


class Doubled:
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs) * 2  # type: ignore[misc]


class Loud(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def louder(module: Any) -> Any:
    module.weight.data.mul_(2)
    return module


def other_class(module: Any) -> None:
    module.__class__ = type("Doubled", (Doubled, type(module)), {})


def other_layout(weight: nn.Parameter) -> None:
    """Let a weight be its memory with dims exchanged: other values at the same address."""
    rows, columns = weight.shape
    weight.data = weight.data.as_strided((rows, columns), (1, rows))


def twice(module: Any, args: Any, out: Any) -> Any:
    return out * 2


def replace(module: Any, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value))


def own_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


TRACED: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda m: m.layers[0].mlp.register_forward_hook(twice),
    "a hook before": lambda m: m.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a class": lambda m: other_class(m.layers[0].mlp),
    "a forward": lambda m: own_forward(m.layers[0].mlp),
    "a number": lambda m: setattr(m.layers[0].mlp.gate, "top_k", 1),
    "a number of a module that is read": lambda m: setattr(m.layers[0].attn_hc, "hc_eps", 0.1),
    "a layout of a weight": lambda m: other_layout(m.embed_tokens.weight),
    "a shape of a weight": lambda m: setattr(m.embed_tokens.weight, "data", m.embed_tokens.weight.data[:64] * 2),
    "a dtype of a weight": lambda m: replace(m.layers[0].attn_hc, "base", m.layers[0].attn_hc.base.bfloat16() * 3),
    "a module": lambda m: setattr(m, "embed_tokens", Loud(512, 128)),
}
USED: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda m: replace(m.layers[0].mlp.experts, "down_proj", m.layers[0].mlp.experts.down_proj * 2),
    "a stacked weight": lambda m: replace(m.layers[0].self_attn.kv_proj, "weight", torch.randn(64, 128)),
    "a weight's data": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data * 2),
    "an equal module": lambda m: setattr(m, "embed_tokens", louder(copy.deepcopy(m.embed_tokens))),
}


@pytest.fixture
def compiled(converted: Any) -> Any:
    """A copy of the model that has run, with the graph of the others."""
    model = copy.deepcopy(converted)
    model.compile(backend="eager", fullgraph=True)
    close(logits(model), logits(converted))
    return model


def changed(model: Any, change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        change(model.model)


@pytest.mark.parametrize("what", [*TRACED, *USED])
def test_a_change_is_used(compiled: Any, converted: Any, what: str) -> None:
    change, eager, count = (TRACED | USED)[what], copy.deepcopy(converted), graphs()
    before = logits(compiled)
    changed(eager, change)
    changed(compiled, change)
    want = logits(eager)
    close(logits(compiled), want)
    assert not torch.allclose(before, want, atol=1e-3)
    assert graphs() == count + (what in TRACED)
    close(logits(compiled), want)
    assert graphs() == count + (what in TRACED)


@pytest.mark.parametrize("what", TRACED)
def test_what_is_traced_again_has_another_fingerprint(converted: Any, what: str) -> None:
    model = copy.deepcopy(converted)
    before = guards.fingerprint(model.model)
    assert before == guards.fingerprint(converted.model)
    changed(model, TRACED[what])
    assert before != guards.fingerprint(model.model)


def test_a_state_of_before_uses_the_graph_of_before(compiled: Any) -> None:
    before, hooks = logits(compiled), []
    for _ in range(3):
        hooks.append(compiled.model.layers[0].mlp.register_forward_hook(twice))
        assert not torch.allclose(logits(compiled), before, atol=1e-3)
        hooks.pop().remove()
        count = graphs()
        close(logits(compiled), before)
        assert graphs() == count


def test_a_hook_of_all_modules_is_noticed(compiled: Any, converted: Any) -> None:
    ran: list[str] = []

    def record(module: Any, args: Any, out: Any) -> Any:
        ran.append(type(module).__name__)
        return out * 2 if isinstance(module, nn.Embedding) else None

    before = logits(compiled)
    handle = nn.modules.module.register_module_forward_hook(record)
    try:
        want, got = logits(converted), logits(compiled)
    finally:
        handle.remove()
    close(got, want)
    assert not torch.allclose(before, want, atol=1e-3)
    close(logits(compiled), before)


def test_tensors_of_a_cache_may_be_replaced(compiled: Any, converted: Any) -> None:
    results = []
    for model in (compiled, converted):
        cache = hf.new_cache(model)
        with torch.no_grad():
            for ids in (IDS, IDS[:, :1]):
                model(ids, past_key_values=cache)
            for layer in cache.paged.layers:
                layer.window = layer.window * 2
            results.append(model(IDS[:, :1], past_key_values=cache).logits)
    close(*results)


class Kept:
    """Names of the guards that stayed, by frame."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, list[str]]] = []

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        needed = IS_NEEDED(entries)
        self.frames.append((len(needed), [e.name for e, stays in zip(entries, needed, strict=True) if stays]))
        return needed


IS_NEEDED = guards.is_needed


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    torch.compiler.reset()
    found = Kept()
    monkeypatch.setattr(guards, "is_needed", found)
    yield found
    torch.compiler.reset()


def wrapper(model: Any, filters: list[Any]) -> Any:
    return torch.compile(model, backend="eager")


def inside_a_function(model: Any, filters: list[Any]) -> Any:
    def call(ids: Tensor) -> Any:
        return model(ids).logits

    return torch.compile(call, backend="eager")


def in_place(model: Any, filters: list[Any]) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model


def with_a_filter(model: Any, filters: list[Any]) -> Any:
    def own(entries: Sequence[Any]) -> list[bool]:
        filters.append(len(entries))
        return [True] * len(entries)

    model.compile(backend="eager", options={"guard_filter_fn": own})
    return model


@pytest.mark.parametrize(
    ("road", "attention_only"),
    [(in_place, False), (in_place, True), (with_a_filter, False), (wrapper, True), (inside_a_function, False)],
)
def test_no_road_guards_layers(road: Any, attention_only: bool, kept: Kept) -> None:
    model = converted_model(attention_only=attention_only)
    filters: list[int] = []
    with torch.no_grad():
        road(model, filters)(random_ids(1, 1))
    total, names = max(kept.frames)
    assert total > 400
    assert [name for name in names if re.match(r"[^(]*_modules\['layers'\]\._modules", name)] == []
    assert [name for name in names if ".paged" in name and "type(" not in name] == []
    assert [name for name in names if name.startswith("G['__builtins_dict__")] == []
    assert [name for name in names if re.fullmatch(r"G\['__import_dsv4_compile_\w+'\]\.[a-z]\w+\.__code__", name)] == []
    assert [name for name in names if re.search(r"__import_dsv4_compile_\w+'\]\._?[A-Z0-9_]+\b", name)] == []
    assert bool(filters) == (road is with_a_filter)


def test_a_mode_becomes_its_options_and_the_filter() -> None:
    given = guards.compile_arguments({"backend": "dsv4", "mode": "max-autotune", "fullgraph": True})
    assert given["mode"] is None and given["fullgraph"] and given["options"]["max_autotune"]
    assert set(given["options"]) == {*mode_settings("max-autotune"), "guard_filter_fn"}
    other = {"backend": "eager", "mode": "max-autotune", "recompile_limit": 3}
    assert {**guards.compile_arguments(other), **other} == guards.compile_arguments(other)
    assert "options" not in guards.compile_arguments(other)


@pytest.mark.parametrize("in_place", [True, False])
def test_one_kind_of_call_more_than_torch_keeps_graphs_for(converted: Any, in_place: bool) -> None:
    torch.compiler.reset()
    model = copy.deepcopy(converted)
    if in_place:
        model.compile(fullgraph=True, backend="eager")
    called = model if in_place else torch.compile(model, fullgraph=True, backend="eager")
    limited = not in_place or "recompile_limit" not in inspect.signature(torch.compile).parameters
    with torch.no_grad(), dynamo_config.patch(recompile_limit=1):
        close(called(IDS).logits, logits(converted))
        with pytest.raises(DSV4Error, match=r"E208[\s\S]*recompile_limit") if limited else nullcontext():
            close(called(IDS, logits_to_keep=1).logits, logits(converted)[:, -1:])
    torch.compiler.reset()


def test_a_model_compiles_where_new_tensors_have_a_default_device(converted: Any) -> None:
    model = copy.deepcopy(converted)
    model.compile(fullgraph=True, backend="eager")
    torch.set_default_device("cpu")
    try:
        close(logits(model), logits(converted))
    finally:
        torch.set_default_device(None)


def test_a_captured_weight_that_moved_is_followed(converted: Any) -> None:
    model = copy.deepcopy(converted)
    options = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "fallback_by_default": True}
    model.compile(fullgraph=True, backend="dsv4", options=options)
    with counting() as counts:
        for _ in range(4):
            close(logits(model), logits(converted))
        assert counts.replays == 2
        weight = model.model.layers[0].mlp.experts.down_proj
        for data in (weight.data * 2, weight.data):
            weight.data = data.clone()
            eager = copy.deepcopy(model)
            for _ in range(4):
                close(logits(model), logits(eager))
    assert counts.captures == 3
