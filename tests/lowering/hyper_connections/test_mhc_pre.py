"""The lowering of `mhc_pre` in C++: one graph for any number of tokens, and what is declined."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile.selection.decisions import collect
from tests.kernels.hyper_connections.calls import arguments, results
from tests.lowering.claims import CPP, HALIDE, SM90, ir_decision

NAMES = ("streams",)


def layer(streams: Tensor, *rest: Tensor) -> list[Tensor]:
    return [each * 2 for each in results(torch.ops.dsv4.mhc_pre(streams * 2, *rest))]


def test_the_compiled_op_is_few_loops_and_equals_eager() -> None:
    compiled, args = torch.compile(layer, backend="dsv4", fullgraph=True), arguments("mhc_pre", 5, 48)
    with torch.no_grad(), collect() as decisions, torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 3, 8):
            step = arguments("mhc_pre", tokens, 48, seed=tokens)
            step = tuple(
                new if isinstance(new, Tensor) and len(new) == tokens else old
                for new, old in zip(step, args, strict=True)
            )
            for each in step:
                if isinstance(each, Tensor) and each.shape[0] == tokens and each.dim() > 1:
                    torch._dynamo.mark_dynamic(each, 0)
            got, code = run_and_get_code(compiled, *step) if tokens == 5 else (compiled(*step), [])
            for actual, want in zip(got, layer(*step), strict=True):
                torch.testing.assert_close(actual, want, rtol=2.0**-7, atol=1e-5)
            for text in code:
                assert text.count("async_compile.cpp_pybinding(") <= 2
    assert [(each.op, each.impl) for each in decisions] == [("mhc_pre", "ir")]


def test_a_declined_call_says_why() -> None:
    call = dict(zip(NAMES, arguments("mhc_pre", 2, 48), strict=False))
    assert ir_decision("mhc_pre", CPP, **call).impl == "ir"
    assert "not for halide" in ir_decision("mhc_pre", HALIDE, **call).reason
    assert ir_decision("mhc_pre", SM90, **call).impl == "ir"
