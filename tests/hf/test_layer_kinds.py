"""Tests of traces that have one layer of each kind: the graph that is compiled is that of a trace of every layer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dsv4_compile import hf
from dsv4_compile._compat import counters
from dsv4_compile.backend import dsv4
from dsv4_compile.debug.watch import watching
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from dsv4_compile.runtime import counting
from dsv4_compile.runtime.repeated_layers import write_out, writes_out
from tests.hf.small import assert_records_what_eager_records, close, logits, random_ids
from tests.hf.test_fp8_weights import twins
from tests.hf.test_redundant_guards import other_class, own_forward, twice

TYPES: Any = tiny_config().layer_types
PAIRS: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [*TYPES[1:3]] * 2, "num_hash_layers": 0}
"""Two kinds, each of two layers."""
SEVEN: dict[str, Any] = {"num_hidden_layers": 7, "layer_types": [TYPES[0], *PAIRS["layer_types"], TYPES[1], TYPES[0]]}
"""A layer of hash routing, then layers of all kinds; SWA and CSA are repeated out of turn."""
ALIKE: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": [TYPES[1]] * 2, "num_hash_layers": 0}
"""Two layers of one kind: a trace takes 0.8 s, that of SEVEN three times as long."""
Graph = tuple[list[str], list[str]]


def in_float32() -> Any:
    return hf.convert(tiny_model(**SEVEN), max_batch_size=2, max_seq_len=64)


def with_scaled_caches() -> Any:
    options = {"kv_cache_dtype": "fp8", "indexer_cache_dtype": "float32"}
    return hf.convert(tiny_model(**ALIKE), max_batch_size=2, max_seq_len=64, **options)


def in_bfloat16() -> Any:
    return hf.convert(tiny_model(dtype=torch.bfloat16, **ALIKE), max_batch_size=2, max_seq_len=64)


def in_e4m3() -> Any:
    return hf.convert(twins(**ALIKE)[0], max_batch_size=2, max_seq_len=64)


def with_a_mixed_layer() -> Any:
    """A compressor of one layer in a different dtype, so that its weights are not stacked."""
    model = tiny_model(dtype=torch.bfloat16, **SEVEN)
    model.model.layers[3].self_attn.compressor.kv_proj.float()
    return hf.convert(model, max_batch_size=2, max_seq_len=64)


FORMS: dict[str, Callable[[], Any]] = {
    "float32": in_float32,
    "scaled caches": with_scaled_caches,
    "bfloat16": in_bfloat16,
    "e4m3": in_e4m3,
    "a layer unlike others": with_a_mixed_layer,
}


def texts(gm: fx.GraphModule) -> Graph:
    """Return the inputs of a graph that it uses, and its other nodes with the modules they were traced in."""
    number: dict[fx.Node, str] = {}
    nodes = [node for node in gm.graph.nodes if node.op != "placeholder"]
    for node in gm.graph.nodes:
        number[node] = node.target if node.op == "placeholder" else f"%{nodes.index(node)}"
    lines = []
    for node in nodes:
        arguments = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        lines.append(f"{node.op} {node.target} {arguments} {stack}")
    return sorted(text for node, text in number.items() if node.op == "placeholder" and node.users), lines


class Seen:
    """A backend that runs graphs as they are, and keeps them as Dynamo traced them and as they would be compiled."""

    def __init__(self, repeats: bool = True) -> None:
        self.repeats = repeats
        self.traced: list[int] = []
        self.graphs: list[Graph] = []

    def writes_layers_out(self, options: Any) -> bool:
        return self.repeats

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.traced.append(len(gm.graph.nodes))
        whole = write_out(gm, inputs)
        whole.gm.graph.lint()
        self.graphs.append(texts(whole.gm))
        return whole.as_traced(whole.gm.forward)


def compiled(model: Any, repeats: bool = True) -> Seen:
    """Compile `model` in place; with `repeats`, as if by a backend that writes repeated layers out."""
    torch.compiler.reset()
    seen = Seen(repeats)
    model.compile(fullgraph=True, backend=seen)
    return seen


def check_by_turns(seen: Seen, *models: Any) -> None:
    """Compare each of `models`, which one backend compiles, with the same model without a compiler."""
    ids = random_ids(2, 12)
    for model in models:
        eager = copy.deepcopy(model)
        model.compile(fullgraph=True, backend=seen)
        close(logits(model, ids), logits(eager, ids))


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_is_that_of_a_trace_of_every_layer(form: str) -> None:
    model = FORMS[form]()
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    by_repeats = {}
    for repeats in (True, False):
        seen = by_repeats[repeats] = compiled(model, repeats)
        results = [logits(model, ids, attention_mask=mask), logits(model, ids[:1, :1])]
        by_repeats[repeats] = seen
        if repeats:
            first = results
    assert len(by_repeats[True].graphs) == len(by_repeats[False].graphs) == 2
    assert by_repeats[True].graphs == by_repeats[False].graphs
    assert all(a < 0.85 * b for a, b in zip(by_repeats[True].traced, by_repeats[False].traced, strict=True))
    for got, want in zip(first, results, strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


def test_only_layers_of_one_kind_are_repeated() -> None:
    model = in_float32()
    with torch.no_grad():
        model(random_ids(1, 3))
    layers = model.model.dsv4_repeats
    # Layer 0 is the only one that routes by hash.
    assert [layer and layer.first for layer in layers] == [None, 1, 2, 1, 2, 1, None]
    assert all(layer is None or (layer.alone and layer.shared) for layer in layers)


def mixed(module: Any, args: Any, out: Any) -> Any:
    """Change the output of a layer by more than a factor, which the norm after the last layer takes away."""
    return out + out.roll(1, -1)


def mixing_forward(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: mixed(layer, args, forward(*args, **kwargs))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda layer: layer.mlp.register_forward_hook(twice),
    "a hook of the layer": lambda layer: layer.register_forward_hook(mixed),
    "a class": lambda layer: other_class(layer.mlp),
    "a forward": lambda layer: own_forward(layer.mlp),
    "a forward of the layer": mixing_forward,
    "a number": lambda layer: setattr(layer.mlp.gate, "top_k", 1),
    "a number of a module that is read": lambda layer: setattr(layer.attn_hc, "hc_eps", 0.1),
    "a weight": lambda layer: setattr(layer.mlp.experts, "down_proj", nn.Parameter(layer.mlp.experts.down_proj * 2)),
    "a weight's data": lambda layer: setattr(layer.input_layernorm.weight, "data", layer.input_layernorm.weight * 2),
    "one weight in two places": lambda layer: setattr(layer.ffn_hc, "base", layer.attn_hc.base),
    "a stacked weight": lambda layer: setattr(layer.self_attn.kv_proj, "weight", nn.Parameter(torch.randn(64, 128))),
    "the dtype of a weight": lambda layer: setattr(
        layer.attn_hc, "base", nn.Parameter(layer.attn_hc.base.bfloat16() * 3)
    ),
}


@pytest.fixture(scope="module")
def pairs() -> Any:
    return hf.convert(tiny_model(**PAIRS), max_batch_size=2, max_seq_len=64)


@pytest.fixture(scope="module")
def alike() -> Any:
    return hf.convert(tiny_model(**ALIKE), max_batch_size=2, max_seq_len=64)


SAME_KIND = ("a weight", "a weight's data", "a stacked weight")
"""Changes that leave a layer of its kind: the graph of before takes the new tensor."""


def change(model: Any, index: int, what: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        CHANGES[what](model.model.layers[index])


@pytest.mark.parametrize("what, index", [("a hook", 1), ("a number", 0), ("a weight", 0), ("a stacked weight", 1)])
def test_a_change_of_one_layer_is_used(what: str, index: int, alike: Any) -> None:
    ids, model, eager = random_ids(2, 12), copy.deepcopy(alike), copy.deepcopy(alike)
    seen = compiled(model)
    before = logits(model, ids)
    close(before, logits(eager, ids))
    for changed in (model, eager):
        change(changed, index, what)
    want = logits(eager, ids)
    close(logits(model, ids), want)
    assert not torch.allclose(before, want, atol=1e-3)
    close(logits(model, ids), want)
    assert len(seen.graphs) == (1 if what in SAME_KIND else 2)


def test_one_tensor_of_two_layers(alike: Any) -> None:
    model, ids = copy.deepcopy(alike), random_ids(2, 12)
    model.model.layers[1].attn_hc.base = model.model.layers[0].attn_hc.base
    eager = copy.deepcopy(model)
    compiled(model)
    close(logits(model, ids), logits(eager, ids))
    with torch.no_grad():
        for changed in (model, eager):
            changed.model.layers[0].attn_hc.base.mul_(3)
    close(logits(model, ids), logits(eager, ids))


def test_layers_without_a_weight_in_common_where_others_have_one(alike: Any) -> None:
    """Models of equal settings, one with a tensor in two places, must not share a graph."""
    shared, apart = copy.deepcopy(alike), copy.deepcopy(alike)
    layers = shared.model.layers
    layers[1].attn_hc.base = layers[0].attn_hc.base
    seen = compiled(shared)
    check_by_turns(seen, shared, apart)
    assert len(seen.graphs) == 2


def test_records_of_repeated_layers() -> None:
    original = tiny_model(**SEVEN)
    model = hf.convert(copy.deepcopy(original), max_batch_size=2, max_seq_len=64)
    compiled(model)
    logits(model, random_ids(2, 20))
    assert_records_what_eager_records(model, original)


def test_other_caches_of_repeated_layers(alike: Any) -> None:
    ids, model = random_ids(2, 12), copy.deepcopy(alike)
    seen = compiled(model)
    results = []
    for each in (model, alike):
        for _ in range(2):
            cache = hf.new_cache(each, max_seq_len=64)
            with torch.no_grad():
                each(ids, past_key_values=cache)
                results.append(each(ids[:, :1], past_key_values=cache).logits)
    for got, want in zip(results[:2], results[2:], strict=True):
        close(got, want)
    assert len(seen.graphs) == 2


def test_layers_of_a_kind_in_one_model_and_of_two_in_another(pairs: Any) -> None:
    """A layer with a setting that no text describes is traced by itself, so models must not share a graph."""
    alike, unlike = copy.deepcopy(pairs), copy.deepcopy(pairs)
    unlike.model.layers[2].mlp.note = object()
    check_by_turns(compiled(alike), alike, unlike)
    assert (alike.model.dsv4_repeated.layers, unlike.model.dsv4_repeated.layers) == ((2, 3), (3,))


CALLS = {"fallback_by_default": True}
"""Inductor calls PyTorch: its C++ is not the question."""
CAPTURED = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"} | CALLS


def test_captures_of_repeated_layers(alike: Any) -> None:
    """Captures know addresses of tensors that Dynamo has never seen."""
    torch.compiler.reset()
    model, eager, ids = copy.deepcopy(alike), copy.deepcopy(alike), random_ids(1, 12)
    model.compile(fullgraph=True, backend="dsv4", options=CAPTURED)

    def steps(of: Any) -> list[Tensor]:
        cache = hf.new_cache(of)
        with torch.no_grad():
            return [of(part, past_key_values=cache).logits for part in (ids, *ids[:, :5].split(1, dim=1))]

    with counting() as counts:
        close(torch.cat(steps(model), 1), torch.cat(steps(eager), 1))
    assert counts.captures and counts.replays
    for changed in (model, eager):
        experts = changed.model.layers[1].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.detach() * 2)
    close(torch.cat(steps(model), 1), torch.cat(steps(eager), 1))
    with torch.no_grad():
        for changed in (model, eager):
            changed.model.layers[1].mlp.experts.down_proj.mul_(2)
    close(torch.cat(steps(model), 1), torch.cat(steps(eager), 1))


def test_nothing_keeps_tensors_of_repeated_layers(alike: Any) -> None:
    torch.compiler.reset()
    model, ids = copy.deepcopy(alike), random_ids(1, 12)
    model.compile(fullgraph=True, backend="dsv4", options=CALLS)
    cache = hf.new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    held = [weakref.ref(cache.paged.layers[1].window), weakref.ref(model.model.layers[1].mlp.experts.down_proj)]
    del cache
    gc.collect()
    assert held[0]() is None
    del model
    gc.collect()
    assert held[1]() is None


def in_place(model: Any, **arguments: Any) -> Any:
    model.compile(**arguments)
    return model


def forward_of(model: Any, **arguments: Any) -> Any:
    model.forward = torch.compile(model.forward, **arguments)
    return model


def stack_of(model: Any, **arguments: Any) -> Any:
    model.model = torch.compile(model.model, **arguments)
    return model


def around(model: Any, *, fullgraph: bool = False, **arguments: Any) -> Any:
    """Compile a function that calls the model, which Dynamo leaves for the checks of the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return torch.compile(call, **arguments)


ROADS: tuple[Callable[..., Any], ...] = (in_place, torch.compile, forward_of, stack_of, around)
"""Ways to compile a model."""


@pytest.fixture
def anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("road", ROADS)
def test_any_road_to_a_backend_that_takes_marks(road: Callable[..., Any], alike: Any) -> None:
    ids, nodes = random_ids(2, 12), list[int]()
    for repeats in (True, False):
        seen, model = Seen(repeats), copy.deepcopy(alike)
        called = road(model, fullgraph=True, backend=seen)
        close(logits(called, ids), logits(alike, ids))
        nodes += seen.traced
    assert len(nodes) == 2 and nodes[0] < 0.8 * nodes[1]


def test_which_backends_take_marks() -> None:
    assert writes_out(dsv4, None) and writes_out(dsv4, {"dsv4.impl": "eager"})
    assert not writes_out(dsv4, {"dsv4.regions": "off"})
    with watching() as watch:
        assert writes_out(watch.backend("dsv4"), None) and not writes_out(watch.backend("eager"), None)
        assert not writes_out(watch.backend("dsv4", options={"dsv4.regions": "off"}), None)


@pytest.mark.usefixtures("anew")
def test_a_backend_without_marks_after_one_with_them(alike: Any) -> None:
    """Dynamo keeps graphs of one function for each backend."""
    model, ids = copy.deepcopy(alike), random_ids(2, 12)
    for backend in (Seen(), "eager", Seen()):
        close(logits(torch.compile(model, backend=backend), ids), logits(alike, ids))
    model.compile(backend=Seen())
    close(logits(torch.compile(model, backend="eager"), ids), logits(alike, ids))


@pytest.mark.usefixtures("anew")
def test_a_graph_break_in_layers(alike: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run between graphs then, and no graph has all of one."""
    model, ids = copy.deepcopy(alike), random_ids(2, 12)
    kind = type(model.model.layers[1].mlp)
    forward = kind.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", broken)
    called = torch.compile(model, backend=Seen())
    for _ in range(2):
        close(logits(called, ids), logits(alike, ids))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_backend_writes_repeated_layers_out(dynamic: bool | None, alike: Any) -> None:
    """With `dynamic`, numbers of modules are inputs of the first trace."""
    ids, model = random_ids(1, 12), copy.deepcopy(alike)
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    model.compile(fullgraph=True, backend="dsv4", dynamic=dynamic, options=CALLS)
    close(logits(model, ids), logits(alike, ids))
    assert counters["stats"]["unique_graphs"] == before + 1
