"""Calls that generated code for a CPU makes without torch's dispatcher."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile import backend
from dsv4_compile.lowering import registry
from dsv4_compile.ops.attention.inv_rope import inv_rope
from dsv4_compile.ops.common.define import ON_CPU, OPS
from dsv4_compile.ops.preprocess.save_partial_states import save_partial_states
from dsv4_compile.selection.decisions import Call
from dsv4_compile.testing import assert_bitwise
from dsv4_compile.testing.samples import op_samples


def step(o: Tensor, positions: Tensor, table: Tensor, scores: Tensor, ape: Tensor, states: Tensor) -> Tensor:
    save_partial_states(scores, ape, states, positions, positions, 4)
    return inv_rope(o, positions, table)


def arguments() -> tuple[Tensor, ...]:
    positions, states = torch.arange(3), torch.full((2, 4, 16), torch.nan)
    return torch.randn(3, 4, 96), positions, torch.randn(9, 32), torch.randn(3, 16), torch.randn(4, 8), states


def test_a_graph_calls_functions_that_compute_and_mutate_as_the_ops_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    called = []
    for op in ("inv_rope", "save_partial_states"):
        function = getattr(ON_CPU, op)
        monkeypatch.setattr(ON_CPU, op, lambda *a, op=op, f=function, **k: (called.append(op), f(*a, **k))[1])
    compiled = torch.compile(step, backend=backend.dsv4, fullgraph=True, options={"dsv4.impl": "eager"})
    args = arguments()
    other = tuple(tensor.clone() for tensor in args)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, *args)
        assert_bitwise(got, step(*other))
    assert_bitwise(args[-1], other[-1])
    assert sorted(called) == ["inv_rope", "save_partial_states"]
    assert "torch.ops.dsv4" not in code.split("def call(")[1].replace("'torch.ops.dsv4", "").replace("(op: torch", "")


def test_wrong_arguments_are_refused_when_a_graph_is_traced() -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend.dsv4, fullgraph=True, options={"dsv4.impl": "eager"})
    wrong = arguments()
    with torch.no_grad(), pytest.raises(Exception, match="E2"):
        compiled(wrong[0][..., :30], *wrong[1:])
    needs_grad = arguments()
    with pytest.raises(Exception, match="E206"):
        compiled(needs_grad[0].requires_grad_(), *needs_grad[1:])


def test_a_size_that_guards_do_not_cover_is_traced_again() -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend.dsv4, fullgraph=True, options={"dsv4.impl": "eager"})
    with torch.no_grad():
        compiled(*arguments())
        wrong = arguments()
        with pytest.raises(Exception, match="E2"):
            compiled(wrong[0], wrong[1][:2], *wrong[2:])


@pytest.mark.parametrize("op", ["mhc_pre", "inv_rope"])
def test_graphs_of_other_devices_call_ops(op: str) -> None:
    registry.load()
    names = [argument.name for argument in OPS[op]._schema.arguments]
    values = dict.fromkeys(names) | dict(zip(names, op_samples(op)[0], strict=False))
    for device, target in (("cpu", registry.twin(op, "eager")), ("xpu", OPS[op]), ("mps", OPS[op])):
        call = Call(op, values, torch.device(device), "triton", device)
        assert registry.target_of(call.choose("eager", "asked for"), call) is target
