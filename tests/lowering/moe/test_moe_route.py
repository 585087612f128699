"""The lowering of `moe_route`: scores and weights fuse with their neighbours, the choice is the reference's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.selection.decisions import collect
from dsv4_compile.testing import assert_bitwise
from tests.lowering.claims import CPP, HALIDE, SM90, ir_decision


def routed(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = torch.ops.dsv4.moe_route(x * 2, gate, bias, None, None, 3, 1.5)
    return ids, weights * 3


def hashed(x: Tensor, gate: Tensor, tokens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = torch.ops.dsv4.moe_route(x * 2, gate, None, tokens, table, 3, 1.5)
    return ids, weights * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_op_is_ir_and_equals_eager_for_any_number_of_tokens(dtype: torch.dtype) -> None:
    gate, bias, table = torch.randn(10, 32).to(dtype), torch.randn(10), torch.randint(-2, 12, (20, 3))
    for layer, others in ((routed, (bias,)), (hashed, (table,))):
        compiled = torch.compile(layer, backend="dsv4", fullgraph=True, dynamic=True)
        with torch.no_grad(), collect() as decisions:
            for tokens in (5, 3, 8):
                x = torch.randn(tokens, 32).to(dtype)
                ids = (torch.randint(-1, 21, (tokens,)),) if layer is hashed else ()
                got, want = compiled(x, gate, *ids, *others), layer(x, gate, *ids, *others)
                assert_bitwise(got[0], want[0])
                torch.testing.assert_close(got[1], want[1])
        assert {(decision.op, decision.impl) for decision in decisions} == {("moe_route", "ir")}


def test_other_backends_are_declined_with_the_reason() -> None:
    arguments = {"x": torch.zeros(2, 8), "gate": torch.zeros(4, 8)}
    for backend in (CPP, SM90):
        assert ir_decision("moe_route", backend, **arguments).impl == "ir"
    assert "not for halide" in ir_decision("moe_route", HALIDE, **arguments).reason
