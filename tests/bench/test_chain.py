"""Scenario `chain`: plain PyTorch and the ops agree and compile, and the gate finds a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import bench
from dsv4_compile.bench import chain, chain_layers, gate, timing
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.config import DeepseekV4Config

CPU = torch.device("cpu")
TINY = {"tiny": DeepseekV4Config(num_heads=2, o_groups=1, q_lora_rank=48, hidden_size=64)}


def found(tokens: int, **only: str) -> list[bench.Problem]:
    return list(chain.problems(CPU, {name: {value} for name, value in only.items()}, TINY, (tokens,)))


def layer_of(problem: bench.Problem) -> chain_layers.ChainLayer:
    return problem.make.func.__self__  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("kind", chain.LAYERS)
def test_the_ops_agree_with_plain_pytorch(kind: str, tokens: int) -> None:
    """20 tokens are more than a CPU has requests for: a chunk of a prompt with some tokens that close a group."""
    layer, projections = found(tokens, layer=kind)
    assert (layer.op, projections.op) == ("chain", "projections")
    want = gate.outputs(layer.reference, layer.make(0), layer.written)
    got = gate.outputs(layer_of(layer).in_ops, layer.make(0), layer.written)
    assert chain.differs(got, want) == ""
    assert all(x.any() for x in want)
    stacked = projections.implementations["stacked"]()(*projections.make(0))
    assert chain.differs(stacked, projections.reference(*projections.make(0))) == ""


@pytest.mark.parametrize("kind", chain.LAYERS)
def test_a_wrong_result_is_found_wherever_it_is(kind: str) -> None:
    (layer,) = found(3, layer=kind, op="chain")
    want = gate.outputs(layer.reference, layer.make(0), layer.written)
    for index, right in enumerate(want):
        for wrong in (right.flip(0), torch.zeros_like(right)):
            if not torch.equal(wrong, right):
                got = [wrong if i == index else x for i, x in enumerate(want)]
                assert chain.differs(got, want).startswith(f"result {index}")


def test_caches_are_as_large_at_every_size() -> None:
    def shapes(tokens: int) -> list[Any]:
        layer = chain_layers.ChainLayer(TINY["tiny"], chain.LAYERS["HCA"], 1024, 8, 40, CPU)
        return [x.shape for i, x in enumerate(layer.inputs(tokens, 0)) if i not in chain_layers.TOKENS_FIRST]

    assert shapes(1) == shapes(7) == shapes(40)


def test_arguments_of_a_seed_repeat() -> None:
    for problem in found(3, op="chain"):
        for a, b in zip(problem.make(5), problem.make(5), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a is b is None


@pytest.mark.parametrize("kind", chain.LAYERS)
def test_plain_pytorch_is_one_graph(kind: str) -> None:
    (layer,) = found(3, layer=kind, op="chain")
    compiled = torch.compile(layer.reference, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = gate.outputs(compiled, layer.make(0), layer.written)
    assert chain.differs(got, gate.outputs(layer.reference, layer.make(0), layer.written)) == ""


def test_the_backend_compiles_the_ops_and_the_result_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)
    (layer,) = found(3, layer="SWA", op="chain")
    with torch.no_grad():
        (row,) = rows_of(layer, {"impl": {"dsv4"}}, CPU)
    assert (row["status"], row["note"]) == ("ok", "")
    assert row["us"] > 0
