"""Lowerings that trace the reference: few loops in C++ for any number of tokens, and reasons for declined calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsv4_compile.ops.common.define import LOWERED, OPS, Traced
from dsv4_compile.selection.decisions import collect
from dsv4_compile.testing.samples import op_samples
from tests.kernels.hyper_connections.calls import arguments, results
from tests.lowering.claims import CPP, HALIDE, SM90, ir_decision


def call_of(op: str, tokens: int, seed: int = 0) -> tuple[Any, ...]:
    """Return arguments of `op`; those of mhc_post are the first of mhc_boundary."""
    return (
        arguments("mhc_boundary", tokens, 48, seed=seed)[:4]
        if op == "mhc_post"
        else arguments(op, tokens, 48, seed=seed)
    )


@pytest.mark.parametrize(("op", "most_loops"), [("mhc_pre", 2), ("mhc_post", 1), ("mhc_boundary", 2), ("mhc_head", 2)])
def test_a_compiled_hyper_connection_is_few_loops_and_equals_eager(op: str, most_loops: int) -> None:

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


@pytest.mark.parametrize("op", sorted(op for op, how in LOWERED.items() if isinstance(how, Traced)))
def test_a_declined_call_says_why(op: str) -> None:
    arguments = dict(zip((a.name for a in OPS[op]._schema.arguments), op_samples(op)[0], strict=False))
    assert ir_decision(op, CPP, **arguments).impl == ir_decision(op, SM90, **arguments).impl == "ir"
    assert "not for halide" in ir_decision(op, HALIDE, **arguments).reason


def test_a_dynamic_dim_after_the_tokens_is_declined() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        tokens, channels = (
            torch.empty(env.create_unbacked_symint(), 4, 48),
            torch.empty(5, 4, env.create_unbacked_symint()),
        )
    assert ir_decision("mhc_pre", CPP, streams=tokens).impl == "ir"
    declined = ir_decision("mhc_pre", CPP, streams=channels)
    assert (declined.impl, "a dim of streams after the first is dynamic" in declined.reason) == ("eager", True)
