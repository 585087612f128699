"""Tests of marks that cut a graph into pieces, each compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dsv4_compile.errors import DSV4Error
from dsv4_compile.runtime.layer_programs import begin, build, end, layer_tensors, pieces_so_far, repeat

_nn: Any = nn
"""Untyped: modules in a list have the type `Tensor | Module`."""


class Layer(_nn.Module):
    """Writes rows of its cache, and multiplies by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("cache", torch.zeros(6, 4))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next `x` `[T, 4]` and rows."""
        self.cache[rows] = x
        return torch.tanh(x @ self.weight) + self.cache.mean(0) * x.shape[0], rows.flip(0)


class Model(_nn.Module):
    """Layers of one kind, with work before, between and after them; `reads` is a tensor that no mark names."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("hidden", torch.ones(4))
        self.reads = reads

    def tensors(self) -> dict[int, list[Tensor]]:
        """Return the tensors of the layers after the first."""
        return {i: [layer.weight, layer.cache] for i, layer in enumerate(self.layers) if i}

    def forward(self, x: Tensor, marked: bool = False) -> Tensor:
        """Return the last layer's result for `x` `[T, 4]`."""
        rows, x, like = torch.arange(x.shape[0]), x * 2, None
        for i, layer in enumerate(self.layers):
            if not marked:
                x, rows = layer(x, rows)
            elif like is not None:
                x, rows = repeat([x, rows], like, i, 0)
            else:
                x, rows = begin([x, rows], [layer.weight, layer.cache], i)
                x, rows = layer(x + self.hidden - 1 if self.reads else x, rows)
                like = x, rows = end([x, rows], i)
            if i == 1:
                x = x + 1
        return x - 1


class Apart:
    """A backend that runs pieces as they are and notes them."""

    def __init__(self) -> None:
        self.pieces: list[fx.GraphModule] = []

    def compile_piece(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.pieces.append(gm)
        return gm

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return build(gm, self.compile_piece)


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()


def run(model: Model, backend: Any, *sizes: int) -> list[Tensor]:
    """Results of a compiled model for inputs of these numbers of rows."""
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    token = layer_tensors.set(model.tensors())
    try:
        with torch.no_grad():
            return [compiled(torch.ones(size, 4), marked=True) for size in sizes]
    finally:
        layer_tensors.reset(token)


def test_pieces_are_compiled_once_and_compute_what_the_layers_do() -> None:
    model, backend = Model(), Apart()
    got, caches = run(model, backend, 5, 3), [layer.cache.clone() for layer in model.layers]
    for layer in model.layers:
        layer.cache.zero_()
    with torch.no_grad():
        want = [model(torch.ones(size, 4)) for size in (5, 3)]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(caches, [layer.cache for layer in model.layers])
    assert len(backend.pieces) == 4  # before the layers, the layer, between two of them, and after them


def test_graphs_that_are_compiled_together_share_pieces() -> None:
    model, backend = Model(), Apart()
    token = pieces_so_far.set({})
    try:
        (first,) = run(model, backend, 5)
        torch._dynamo.reset()
        for layer in model.layers:
            layer.cache.zero_()
        (second,) = run(model, backend, 5)
    finally:
        pieces_so_far.reset(token)
    assert torch.equal(first, second)
    assert len(backend.pieces) == 4


def test_a_piece_is_compiled_again_for_sizes_that_it_was_not_compiled_for() -> None:
    """A piece is compiled again where the second graph breaks an assumption of the first on sizes."""
    model, assume = Model(), [4]

    class Assuming(Apart):
        def compile_piece(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            for value in inputs:
                if isinstance(value, torch.SymInt) and assume:
                    assert value > assume[0]
            return super().compile_piece(gm, inputs)

    backend = Assuming()
    token = pieces_so_far.set({})
    try:
        run(model, backend, 5)
        assert len(backend.pieces) == 4
        torch._dynamo.reset()
        assume.clear()
        run(model, backend, 3)
    finally:
        pieces_so_far.reset(token)
    assert len(backend.pieces) > 4


def test_a_layer_that_reads_an_unnamed_tensor_is_refused() -> None:
    with pytest.raises(Exception, match="E208") as raised:
        run(Model(reads=True), Apart(), 5)
    assert "hidden" in str(raised.value)


def test_a_graph_with_marks_runs_by_pieces_alone() -> None:
    with pytest.raises(DSV4Error, match="E208"):
        run(Model(), "eager", 5)
