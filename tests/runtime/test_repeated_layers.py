"""Tests of marks in a trace, and of the graph that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dsv4_compile.errors import DSV4Error
from dsv4_compile.runtime.repeated_layers import begin_layer, end_layer, repeat_layer, write_out

_nn: Any = nn
"""Untyped: modules in a list have the type `Tensor | Module`."""


class Layer(_nn.Module):
    """Writes rows of its cache by a table of all layers, and multiplies by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("cache", torch.zeros(6, 4))

    def own(self) -> list[Tensor]:
        return [self.weight, self.cache]

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the next `x` `[T, 4]`."""
        self.cache[table[: x.shape[0]]] = x
        return torch.tanh(x @ self.weight) + self.cache.mean(0)


class Model(_nn.Module):
    """Layers of which all after the first may be marked as its repeats."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("table", torch.arange(6).flip(0))
        self.marked = True

    def own(self, layer: Any) -> list[Tensor]:
        return list(layer.own())

    def shared(self) -> list[Tensor]:
        return [self.table]

    def call(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x, self.table)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's result for `x` `[T, 4]`."""
        x = x * 2
        for i, layer in enumerate(self.layers):
            if not self.marked:
                x = self.call(layer, x)
            elif i > 0:
                x = repeat_layer(x, self.own(layer), i, 0)
            else:
                x = end_layer(self.call(layer, begin_layer(x, self.own(layer), self.shared(), i)), i)
        return x + 1


@pytest.fixture(autouse=True)
def anew() -> None:
    torch.compiler.reset()


def run(model: Any, rows: int, finish: Callable[[fx.GraphModule], Any] = write_out) -> tuple[Tensor, list[str]]:
    found: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        finish(gm)
        gm.graph.lint()
        found.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    with torch.no_grad():
        step = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        return step(torch.arange(4.0 * rows).view(rows, 4)), found


@pytest.mark.parametrize("rows", [1, 5])
def test_repeated_layers_have_their_own_tensors(rows: int) -> None:
    model = Model()
    traced = copy.deepcopy(model)
    traced.marked = False
    (got, nodes), (want, every) = run(model, rows), run(traced, rows)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    torch.testing.assert_close(dict(model.named_buffers()), dict(traced.named_buffers()), atol=0, rtol=0)
    assert sorted(nodes) == sorted(every)


def test_a_graph_without_marks_stays_as_it_is() -> None:
    model = Model()
    model.marked = False
    before: list[fx.Node] = []

    def finish(gm: fx.GraphModule) -> None:
        before.extend(gm.graph.nodes)
        write_out(gm)
        assert list(gm.graph.nodes) == before

    run(model, 3, finish)
    assert before


class ReadsAnother(Model):
    """Reads a tensor that no list names."""

    def shared(self) -> list[Tensor]:
        return []


class Forgets(Model):
    """Names fewer tensors of later layers."""

    def own(self, layer: Any) -> list[Tensor]:
        return super().own(layer)[: 2 if layer is self.layers[0] else 1]


class Mistakes(Model):
    """Names another tensor of later layers."""

    def own(self, layer: Any) -> list[Tensor]:
        return super().own(layer)[:: 1 if layer is self.layers[0] else -1]


class Divides(Model):
    """Reads a value from inside its first layer at the end."""

    def call(self, layer: Any, x: Tensor) -> Tensor:
        self.inside = x * 3
        return super().call(layer, self.inside)

    def forward(self, x: Tensor) -> Tensor:
        """Return what another model returns, and more."""
        return super().forward(x) + self.inside


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReadsAnother, "which its kind does not name"),
        (Forgets, "1 tensors of layer 1, 2 of layer 0"),
        (Mistakes, "of layer 1 is no"),
        (Divides, "of layer 0 is read outside of it"),
    ],
)
def test_layers_that_cannot_stand_for_others(kind: type[Model], why: str) -> None:
    with pytest.raises(Exception, match=rf"E208[\s\S]*{why}"):
        run(kind(), 3)


def test_another_backend_gets_an_error() -> None:
    with pytest.raises(DSV4Error, match=r"E208[\s\S]*backend=\"dsv4\""):
        run(Model(), 3, lambda gm: None)
