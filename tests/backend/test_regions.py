"""Tests of graphs that are compiled in regions, each kind of layer once."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from dsv4_compile._compat import compile_fx
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.passes import Regional
from dsv4_compile.passes.lent import lent_to_inductor
from dsv4_compile.passes.regions import split
from dsv4_compile.runtime.regions import Program, Region
from dsv4_compile.selection import decisions

_nn: Any = nn
"""Untyped: modules in a list have the type `Tensor | Module`."""
ROWS = 6
KINDS = ["sliding_attention", *["heavily_compressed_attention"] * 3]


class Layer(_nn.Module):
    """Writes rows of its private cache and adds a projection; every second layer is wider."""

    def __init__(self, wide: bool, share: Any = None) -> None:
        super().__init__()
        self.up: Any = nn.Linear(4, 8 if wide else 4)
        self.down: Any = nn.Linear(8 if wide else 4, 4)
        self.register_buffer("cache", torch.zeros(ROWS, 4) if share is None else share.cache)

    def forward(self, x: Tensor, places: Tensor, other: Tensor | None = None, index: int = 0) -> Tensor:
        """Return the next `x`; `other` adds its largest rows, or where they are."""
        if other is not None:
            x = x + torch.max(other, 0)[index]
        self.cache[places] = x
        return torch.tanh(x + self.down(torch.relu(self.up(x))) + self.cache.mean(0))


class Model(_nn.Module):
    """An embedding, seven layers with an operation between them, and a head."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList(Layer(wide=i % 2 == 1) for i in range(7))
        if shared:
            self.layers[4] = Layer(False, self.layers[2])

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits and the result of each layer."""
        x, hidden = self.embed(ids), []
        for layer in self.layers:
            x = layer(x, torch.arange(ids.shape[0]) % ROWS)
            hidden.append(x)
            x = x * 2
        return self.head(x), hidden


class Reads(Model):
    """Also returns a row of the first layer's cache, as it is before or after the layers."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.after = after

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits and the row."""
        first: Any = self.layers[0]
        row = first.cache[0]
        row = row if self.after else row * 1
        logits, _ = super().forward(ids)
        return logits, [row * 1]


class ReadsEarlier(Model):
    """Has two layers that read the first layer's cache, in one op of two results."""

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits alone."""
        x, first = self.embed(ids), self.layers[0]
        for i, layer in enumerate(self.layers):
            more = {3: (first.cache, 0), 5: (first.cache, 1)}.get(i, ())
            x = layer(x, torch.arange(ids.shape[0]) % ROWS, *more)
        return self.head(x), []


class Inner:
    """Stands for Inductor's compilation of one graph: keeps the graph, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
        self.graphs.append(gm)

        def run(given: list[Any]) -> Any:
            return gm(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@pytest.fixture
def inner() -> Iterator[Inner]:
    torch.compiler.reset()
    yield Inner()


def compiled(model: Any, inner: Inner, wanted: str = "on") -> Any:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        with lent_to_inductor():
            return compile_fx(gm, inputs, inner_compile=Regional(inner, wanted).compile)

    return torch.compile(model, backend=backend, fullgraph=True, dynamic=True)


@torch.no_grad()
def assert_same_steps(model: Model, inner: Inner, wanted: str = "on") -> None:
    """Compare some calls of a compiled copy with the model's, with the caches they leave."""
    other = copy.deepcopy(model)
    run = compiled(other, inner, wanted)
    for rows in (3, 5, 2):
        ids = torch.randint(0, 9, (rows,))
        torch.testing.assert_close(run(ids), model(ids))
        torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_a_kind_of_layer_is_compiled_once(inner: Inner) -> None:
    assert_same_steps(Model(), inner)
    # What comes before the layers, both kinds, and the last layer with the head.
    assert len(inner.graphs) == 4


def test_auto_leaves_a_graph_whole_where_little_is_saved(inner: Inner) -> None:
    model = Model()
    del model.layers[4:]
    assert_same_steps(model, inner, "auto")
    assert len(inner.graphs) == 1


def test_a_graph_without_layers_is_compiled_whole(inner: Inner) -> None:
    model = Model()
    del model.layers[1:]
    assert_same_steps(model, inner)
    assert len(inner.graphs) == 1


@pytest.mark.parametrize("model", [Model(shared=True), Reads(after=False)], ids=["written twice", "read before"])
def test_a_cache_that_another_layer_uses_keeps_the_graph_whole(model: Model, inner: Inner) -> None:
    assert_same_steps(model, inner)
    assert len(inner.graphs) == 1


def test_a_cache_that_is_read_after_its_layer_has_its_new_rows(inner: Inner) -> None:
    assert_same_steps(Reads(after=True), inner)
    assert len(inner.graphs) > 1


def test_layers_that_read_an_earlier_cache_read_its_new_rows(inner: Inner) -> None:
    assert_same_steps(ReadsEarlier(), inner)
    assert len(inner.graphs) > 1
    # A cache is read where it lies: a region returns what it hands on, and no copy of a cache.
    outputs = [value.meta["val"] for value in inner.graphs[1].graph.output_node().all_input_nodes]
    assert [tuple(value.shape) == (ROWS, 4) for value in outputs] == [False]


def test_a_result_of_a_tuple_stays_with_its_op() -> None:
    """The next layer may take a tuple apart; what leaves a region are tensors."""
    graph, aten = torch.fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)

    def traced(layer: int, target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        values = [value.meta["val"] if isinstance(value, torch.fx.Node) else value for value in args]
        node.meta = {"val": target(*values), "nn_module_stack": {"layer": (f"layers.{layer}", Layer)}}
        return node

    first = x
    for layer in range(3):
        sorted_ = traced(layer, aten.sort.default, first)
        first = traced(layer + 1, aten.neg.default, traced(layer + 1, operator.getitem, sorted_, 0))
    graph.output((first,))
    regions = split(torch.fx.GraphModule(nn.Module(), graph))
    targets = [[node.target for node in region.outputs] for region in regions]
    assert targets == [*[[operator.getitem]] * 3, [aten.neg.default]]
    assert all(isinstance(node.meta["val"], Tensor) for region in regions for node in region.outputs)


def test_a_graph_with_a_backward_is_compiled_whole(inner: Inner) -> None:
    model = Model()
    del model.layers[2:]
    compiled(model, inner)(torch.tensor([1, 2, 3]))[0].sum().backward()
    assert len(inner.graphs) == 2  # forward and backward


def test_values_are_dropped_after_their_last_use() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(operator.neg, (x,))
    z = graph.call_function(operator.neg, (y,))
    graph.output((z, 7, None))

    def run(given: list[Any]) -> list[Any]:
        return [-given[0]]

    program = Program([Region((x,), (y,), run), Region((y,), (z,), run)], {x: 0}, graph.output_node())
    inputs = [3]
    assert program(inputs) == [3, 7, None]
    assert inputs == []
    assert [step.dead for step in program.steps] == [(0,), (1,)]


def test_decisions_of_a_kind_count_for_all_its_layers() -> None:
    with decisions.collect() as recorded, decisions.times(3):
        decisions.record(decisions.Decision("inv_rope", "eager", "a test"))
        decisions.record(decisions.Fusion("fuse_output", ("a", "b"), "c", True, "a test"))
    assert (len(recorded), len(recorded.fusions)) == (3, 3)


def test_hyper_connections_of_neighbouring_layers_stay_together(inner: Inner) -> None:
    model = tiny_model(num_hidden_layers=4, layer_types=KINDS, num_hash_layers=1)
    original = copy.deepcopy(model)
    hf.convert(model, max_batch_size=2, max_seq_len=64, attention_only=False)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=Regional(inner, "on").compile)

    model.compile(backend=backend, fullgraph=True)
    ids = torch.randint(0, 512, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids, use_cache=False).logits, atol=2e-4, rtol=0)
    names = [[str(node.target) for node in gm.graph.nodes] for gm in inner.graphs]
    ends = [[name for name in targets if name.startswith("dsv4.mhc_p") or "mhc_head" in name] for targets in names]
    assert ends == [
        ["dsv4.mhc_pre.default"],
        ["dsv4.mhc_post.default", "dsv4.mhc_pre.default"],
        ["dsv4.mhc_post.default", "dsv4.mhc_pre.default"],
        ["dsv4.mhc_post.default", "dsv4.mhc_head.default"],
    ]
