"""IR of `moe_route` on a GPU against the reference there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.lowered import as_ir

OP = "moe_route"
SIZES = (7, 64, 513)


def biased(op: Any, x: Any, gate: Any, bias: Any, tokens: Any, table: Any) -> Any:
    return op(x, gate, bias, None, None, 6, 1.5)


def hashed(op: Any, x: Any, gate: Any, bias: Any, tokens: Any, table: Any) -> Any:
    return op(x, gate, None, tokens, table, 6, 1.5)


@pytest.mark.parametrize("call", [biased, hashed])
@torch.inference_mode()
def test_choice_and_weights_are_those_of_the_op(call: Any) -> None:
    compiled = as_ir(OP, call)
    gate, bias = torch.randn(256, 1024, device="cuda") * 0.03, torch.randn(256, device="cuda") * 0.05
    table = torch.randint(-1, 257, (100, 6), device="cuda")
    for tokens in (*SIZES, 1):
        x, ids = torch.randn(tokens, 1024, device="cuda"), torch.randint(-1, 101, (tokens,), device="cuda")
        if tokens > 1:
            for tensor in (x, ids):
                torch._dynamo.mark_dynamic(tensor, 0)
        got = compiled(x, gate, bias, ids, table)
        want = call(REFERENCES[OP], x, gate, bias, ids, table)
        # Scores that differ by less than a rounding may be chosen in either order.
        assert (got[0] == want[0]).float().mean() > 0.999, f"{tokens} tokens"
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
