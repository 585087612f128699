"""Tests of marks in a trace, and of the graph that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dsv4_compile.errors import DSV4Error
from dsv4_compile.runtime.repeated_layers import (
    Handed,
    Written,
    begin_layer,
    end_layer,
    handed,
    repeat_layer,
    write_out,
)

_nn: Any = nn
"""Untyped: modules in a list have the type `Tensor | Module`."""


class Layer(_nn.Module):
    """Writes rows of its cache by a table of all layers, and multiplies by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("cache", torch.zeros(6, 4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the next `x` `[T, 4]`."""
        self.cache[table[: x.shape[0]]] = x
        return torch.tanh(x @ self.weight) + self.cache.mean(0)


class Model(_nn.Module):
    """Layers; all after the first may be marked as its repeats."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("table", torch.arange(6).flip(0))
        self.marked = True

    def weights(self, layer: Any) -> list[Tensor]:
        return [layer.weight]

    def handed(self) -> Handed:
        """Return the tensors of the layers after the first."""
        later = list(self.layers)[1:]
        return Handed([weight for layer in later for weight in self.weights(layer)], [layer.cache for layer in later])

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
                x = repeat_layer(x, i, 0)
            else:
                x = begin_layer(x, self.weights(layer), [layer.cache], self.shared(), i)
                x = end_layer(self.call(layer, x), i)
        return x + 1


@pytest.fixture(autouse=True)
def anew() -> None:
    torch.compiler.reset()


def run(model: Any, rows: int, finish: Callable[[fx.GraphModule, Any], Written] = write_out) -> Any:
    """Return the result of a compiled model, and the targets of the nodes of its graph."""
    targets: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        written = finish(gm, inputs)
        written.gm.graph.lint()
        targets.extend(str(node.target) for node in written.gm.graph.nodes)
        return written.as_traced(written.gm.forward)

    token = handed.set(model.handed() if model.marked else Handed())
    try:
        with torch.no_grad():
            step = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
            return step(torch.arange(4.0 * rows).view(rows, 4)), targets
    finally:
        handed.reset(token)


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

    def finish(gm: fx.GraphModule, inputs: Any) -> Written:
        before.extend(gm.graph.nodes)
        written = write_out(gm, inputs)
        assert written.gm is gm and written.example_inputs is inputs and list(gm.graph.nodes) == before
        return written

    run(model, 3, finish)
    assert before


class ReadsAnother(Model):
    """Reads a tensor that no list names."""

    def shared(self) -> list[Tensor]:
        return []


class Forgets(Model):
    """Hands over fewer tensors than its later layers have."""

    def handed(self) -> Handed:
        return super().handed()._replace(weights=[self.layers[1].weight])


class Adds(Model):
    """Hands over more tensors than its later layers have."""

    def handed(self) -> Handed:
        return super().handed()._replace(caches=[layer.cache for layer in self.layers])


class Mistakes(Model):
    """Hands over a different kind of tensor of later layers."""

    def handed(self) -> Handed:
        return Handed(*reversed(super().handed()))


class Divides(Model):
    """Reads a value from inside its first layer at the end."""

    def call(self, layer: Any, x: Tensor) -> Tensor:
        self.inside = x * 3
        return super().call(layer, self.inside)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the base model plus a tensor."""
        return super().forward(x) + self.inside


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReadsAnother, "which its kind does not name"),
        (Forgets, "1 tensors are too few for layer 2"),
        (Adds, "3 tensors are more than its repeated layers have"),
        (Mistakes, "a tensor of layer 1 is no .*weight.* of layer 0"),
        (Divides, "of layer 0 is read outside of it"),
    ],
)
def test_layers_that_cannot_stand_for_others(kind: type[Model], why: str) -> None:
    with pytest.raises(Exception, match=rf"E208[\s\S]*{why}"):
        run(kind(), 3)


def test_another_backend_gets_an_error() -> None:
    with pytest.raises(DSV4Error, match=r"E208[\s\S]*backend=\"dsv4\""):
        run(Model(), 3, Written)


def test_a_call_without_the_tensors_of_repeated_layers() -> None:
    model, steps = Model(), list[Callable[..., Any]]()

    def finish(gm: fx.GraphModule, inputs: Any) -> Written:
        written = write_out(gm, inputs)
        steps.append(written.as_traced(written.gm.forward))
        return written

    run(model, 3, finish)
    with pytest.raises(DSV4Error, match=r"E208[\s\S]*0 weights and 0 caches were handed over, 4 tensors when"):
        steps[0](torch.zeros(3, 4))
