"""Not a test: what the lowering of every hyper-connection op is held to in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile.selection.decisions import collect
from tests.kernels.hyper_connections.calls import arguments, results
from tests.lowering.claims import CPP, HALIDE, SM90, ir_decision


def call_of(op: str, tokens: int, seed: int = 0) -> tuple[Any, ...]:
    """Return arguments of `op`; those of mhc_post are the first of mhc_boundary."""
    return (
        arguments("mhc_boundary", tokens, 48, seed=seed)[:4]
        if op == "mhc_post"
        else arguments(op, tokens, 48, seed=seed)
    )


def assert_is_few_loops_and_equals_eager(op: str, most_loops: int) -> None:
    """Compile `op` between two multiplications once for any number of tokens, and compare with eager."""

    def layer(streams: Tensor, *rest: Any) -> list[Tensor]:
        return [result * 2 for result in results(getattr(torch.ops.dsv4, op)(streams * 2, *rest))]

    compiled, args = torch.compile(layer, backend="dsv4", fullgraph=True), call_of(op, 5)
    with torch.no_grad(), collect() as decisions, torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 3, 8):
            step = tuple(
                new if isinstance(new, Tensor) and len(new) == tokens else old
                for new, old in zip(call_of(op, tokens, tokens), args, strict=True)
            )
            for value in step:
                if isinstance(value, Tensor) and value.shape[0] == tokens and value.dim() > 1:
                    torch._dynamo.mark_dynamic(value, 0)
            got, code = run_and_get_code(compiled, *step) if tokens == 5 else (compiled(*step), [])
            for actual, want in zip(got, layer(*step), strict=True):
                torch.testing.assert_close(actual, want, rtol=2.0**-7, atol=1e-5)
            for text in code:
                assert text.count("async_compile.cpp_pybinding(") <= most_loops
    assert [(decision.op, decision.impl) for decision in decisions] == [(op, "ir")]


def assert_a_declined_call_says_why(op: str, *names: str) -> None:
    """Compare the decisions for a call with the first arguments `names`."""
    call = dict(zip(names, call_of(op, 2), strict=False))
    assert ir_decision(op, CPP, **call).impl == "ir"
    assert "not for halide" in ir_decision(op, HALIDE, **call).reason
    assert ir_decision(op, SM90, **call).impl == "ir"
