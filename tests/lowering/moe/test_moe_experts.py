"""The lowering of `moe_experts`: weights are read where they are, in one graph for any number of tokens."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.selection.decisions import collect
from dsv4_compile.testing import hostile_indices
from tests.kernels.moe.problems import ACCURACY, error, exact, experts
from tests.lowering.claims import CPP, HALIDE, SM90, ir_decision

COUNT, INNER, HIDDEN = 7, 96, 160


def arguments(tokens: int, kind: str, shared: str, dtype: torch.dtype) -> ExpertsArguments:
    sizes = {"hidden": HIDDEN, "inner": INNER, "shared_inner": INNER, "count": COUNT, "top_k": 3}
    return experts(tokens, kind=kind, shared=shared, dtype=dtype, **sizes)


def layer(x: Tensor, *rest: Tensor) -> Tensor:
    return torch.ops.dsv4.moe_experts(x * 2, *rest) + 1


@pytest.mark.parametrize(
    ("kind", "shared", "dtype"), [("float32", "", torch.float32), ("bfloat16", "bfloat16", torch.bfloat16)]
)
def test_the_compiled_op_is_ir_without_a_copy_of_weights(kind: str, shared: str, dtype: torch.dtype) -> None:
    weights = arguments(1, kind, shared, dtype)
    compiled = torch.compile(layer, backend="dsv4", fullgraph=True)
    with torch.no_grad(), collect() as decisions:
        for tokens in (5, 3, 8):
            sample = arguments(tokens, kind, shared, dtype)
            call = weights._replace(x=sample.x, ids=hostile_indices((tokens, 3), COUNT), weights=sample.weights)
            for tensor in call[:3]:
                torch._dynamo.mark_dynamic(tensor, 0)
            got, code = run_and_get_code(compiled, *call)
            want = exact(call._replace(x=2 * call.x)) + 1
            assert (got.dtype, got.shape) == (dtype, call.x.shape)
            assert error(got, want) <= (1e-6 if dtype is torch.float32 else 2 * ACCURACY)
            for text in code:
                # No buffer has both dims of a weight.
                buffers = re.findall(r"empty_strided_cpu\(\(([^()]*)\)", text)
                assert buffers
                for sizes in buffers:
                    numbers = {int(size) for size in re.findall(r"\b\d+\b", sizes)}
                    assert not {HIDDEN, 2 * INNER} <= numbers and not {HIDDEN, INNER} <= numbers, sizes
    assert {(decision.op, decision.impl) for decision in decisions} == {("moe_experts", "ir")}


def test_other_calls_are_declined_with_the_reason() -> None:
    call = experts(2, kind="float32", dtype=torch.float32)._asdict()
    for backend in (CPP, SM90):
        assert ir_decision("moe_experts", backend, **call).impl == "ir"
    assert "not for halide" in ir_decision("moe_experts", HALIDE, **call).reason
    quantised = experts(2, kind="mxfp4")._asdict()
    assert "w13 is torch.uint8" in ir_decision("moe_experts", CPP, **quantised).reason
    shared = experts(2, shared="e4m3")._asdict()
    assert "shared_w13 is torch.float8_e4m3fn" in ir_decision("moe_experts", CPP, **shared).reason


def test_a_quantised_call_runs_the_reference_when_compiled() -> None:
    call = experts(3, kind="mxfp4")
    compiled = torch.compile(OPS["moe_experts"], backend="dsv4", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*call), OPS["moe_experts"](*call))
