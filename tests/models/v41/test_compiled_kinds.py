"""`compile` traces and compiles one layer of each kind; the others run its code on their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx

from dsv4_compile.errors import InputError
from dsv4_compile.models.v41 import V41Format, V41Model, compile, generate
from dsv4_compile.models.v41.compiled import CompiledSteps
from dsv4_compile.models.v41.layer_kinds import set_kinds
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.runtime.layer_programs import build

SHARES_GRAPHS = True
LAYERS: dict[str, Any] = {
    "num_layers": 12,
    "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    "kv_sources": (2, 4, 6),
    "index_sources": (2, 4, 6, 8, 10),
    "candidate_source": 6,
    "engram_layers": (1,),
    "engram_rows": (434,),
}
"""Pairs of sources and of layers that read them, at both ratios."""
FIRST_OF_KIND = [-1, -1, 2, 3, 2, 3, -1, 7, 8, 7, 8, 7]
"""Layers 0 and 1 differ by an engram; 6 is the last source."""


class Apart:
    """A backend that runs pieces of graphs as they are and notes graphs and pieces."""

    def __init__(self) -> None:
        self.inputs: list[list[Any]] = []
        self.pieces: list[fx.GraphModule] = []

    def compiles_layers_apart(self, options: Any) -> bool:
        return True

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        self.inputs.append(inputs)
        return build(gm, self.compile_piece)

    def compile_piece(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.pieces.append(gm)
        return gm

    def layers(self) -> list[int]:
        """Return how many attentions each piece has."""
        return [str(gm.code).count("sparse_mla_mixed") for gm in self.pieces]


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(**LAYERS)


class Compiled(NamedTuple):
    """Steps of a model, their backend, and how many graphs it had when they were compiled."""

    steps: CompiledSteps
    backend: Apart
    graphs: int


@pytest.fixture(scope="module")
def compiled(model: V41Model) -> Compiled:
    backend, caches = Apart(), model.new_caches(max_batch_size=2, max_seq_len=64, cache_format=V41Format.plain())
    return Compiled(compile(model, caches=caches, backend=backend), backend, len(backend.inputs))


def test_layers_of_one_kind_have_one_code(model: V41Model, compiled: Compiled) -> None:
    assert [layer.first_of_kind for layer in model._stack()] == FIRST_OF_KIND
    # Layers 0 and 1, 2, 3, 6, 8, and norm and head; 6 on a tail, and its insertion. With caches of these
    # sizes layer 7 has the code of 3.
    assert compiled.backend.layers()[:8] == [2, 1, 1, 1, 1, 0, 1, 0]
    assert compiled.graphs == 3
    prompts, options = [[1, 2, 3, 4, 5] * 4, [7, 8, 9]], {"max_new_tokens": 6, "mode": "replay"}
    with torch.compiler.set_stance("fail_on_recompile"):
        got = generate(model, prompts, **options, forward=compiled.steps)
    other = model.new_caches(max_batch_size=2, max_seq_len=64, cache_format=V41Format.plain())
    assert got == generate(model, prompts, **options, caches=other)


def test_numbers_of_modules_are_constants(compiled: Compiled) -> None:
    """Else AOTAutograd traces a graph with numbers as inputs, and again without; so do later compilations."""
    steps, backend = compiled.steps, compiled.backend
    rows = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        steps._forward(rows, rows - 1, rows - 1, steps.caches, last=rows)
    assert len(backend.inputs) > compiled.graphs
    for inputs in backend.inputs:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        assert not any(tensor.dim() == 0 and tensor.dtype is torch.float64 for tensor in tensors)
        assert not any(isinstance(value, (float, torch.SymFloat)) for value in inputs)


def test_a_weight_that_was_replaced_is_read_and_one_of_a_different_shape_refused(
    model: V41Model, compiled: Compiled
) -> None:
    gate: Any = model.layers[9].ffn.gate
    before, options = gate.weight, {"max_new_tokens": 4}
    plain = generate(model, [[1, 2, 3]], **options, forward=compiled.steps)
    try:
        gate.weight = torch.nn.Parameter(torch.randn_like(before), requires_grad=False)
        got = generate(model, [[1, 2, 3]], **options, forward=compiled.steps)
        caches = model.new_caches(max_batch_size=2, max_seq_len=64, cache_format=V41Format.plain())
        assert got == generate(model, [[1, 2, 3]], **options, caches=caches) != plain
        gate.weight = torch.nn.Parameter(before.double(), requires_grad=False)
        with pytest.raises(InputError, match="layer 9"):
            generate(model, [[1, 2, 3]], **options, forward=compiled.steps)
    finally:
        gate.weight = before


def test_a_hook_of_a_layer_that_was_not_traced_is_refused(model: V41Model, compiled: Compiled) -> None:
    layer: Any = model.layers[9]
    options: dict[str, Any] = {"max_new_tokens": 2, "forward": compiled.steps}
    want = generate(model, [[1, 2, 3]], **options)
    for register in (layer.ffn.gate.register_forward_hook, layer.register_forward_pre_hook):
        hook = register(lambda *_: None)
        with pytest.raises(InputError, match="layer 9 with hooks"):
            generate(model, [[1, 2, 3]], **options)
        hook.remove()
    assert generate(model, [[1, 2, 3]], **options) == want


def test_layers_that_differ_have_no_kind() -> None:
    """By a hook, a setting, or the dtype of a weight."""
    model = tiny_model(**LAYERS)
    layers: Any = model._stack()
    caches = model.new_caches(max_batch_size=2, max_seq_len=64, drafts=False)
    layers[9].ffn.register_forward_hook(lambda *_: None)
    layers[5].eps = 1e-3
    layers[4].attn.attn_sink = torch.nn.Parameter(layers[4].attn.attn_sink.double(), requires_grad=False)
    set_kinds(layers, caches)
    assert [layer.first_of_kind for layer in layers] == [-1, -1, -1, -1, -1, -1, -1, 7, 8, -1, 8, 7]
