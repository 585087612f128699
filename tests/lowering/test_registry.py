"""Tests of the ops that the backend puts into a graph."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile._compat import lowerings
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS
from dsv4_compile.options import Options
from dsv4_compile.selection.decisions import Call
from dsv4_compile.testing.samples import op_samples

LONG = registry.COMPILES_LONG


@pytest.mark.parametrize(("impl", "ops"), [("eager", list(OPS)), ("triton", list(KERNELS))])
def test_an_opaque_op_has_its_lowering_before_a_graph_is_compiled(impl: str, ops: list[str]) -> None:
    registry.load()
    twins = [registry.twin(op, impl) for op in ops]
    assert twins and [twin for twin in twins if twin not in lowerings] == []
    assert all(torch.Tag.needs_exact_strides in twin.tags for twin in twins)


@pytest.mark.parametrize("op", ["mhc_pre", "mhc_boundary", "mhc_head", "inv_rope"])
def test_auto_leaves_ops_on_a_cpu_to_their_references_and_says_why(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(registry, "COMPILES_LONG", LONG)
    registry.load()
    names = [argument.name for argument in OPS[op]._schema.arguments]
    values = dict(zip(names, op_samples(op)[0], strict=False))
    on_cpu = Call(op, dict.fromkeys(names) | values, torch.device("cpu"), "cpp", "cpu")
    decision = registry.decide(on_cpu, Options())
    assert (decision.impl, decision.reason) == (
        "eager",
        f"{LONG}; dsv4.impl=ir uses it all the same; its kernel runs on GPUs",
    )
    assert registry.decide(on_cpu, Options(impl="ir")).impl == "ir"
    on_gpu = Call(op, on_cpu.arguments, torch.device("cpu"), "triton", "cpu")
    assert registry.decide(on_gpu, Options()).impl == "ir"
