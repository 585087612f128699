"""The lowering of `fused_q_kv_rmsnorm`: its Triton and C++, and their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.claims import CPP, HALIDE, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.generated import on_cpp
from tests.lowering.preprocess.cases_fused_q_kv_rmsnorm import CASES

# The sum of squares has a different order, which moves the norm by its last bits: one step after rounding to bfloat16,
# two where the result is scaled and rounded again, and a unit of 2^-23 of the largest element or two in float32.
STEPS = {"fused": 2, "float32": 2}


@pytest.mark.parametrize("case", list(CASES))
def test_triton_equals_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case], steps=STEPS.get(case, 1))


@pytest.mark.parametrize("case", list(CASES))
def test_each_half_is_one_kernel_and_columns_are_not_copied(interpreted: Reports, case: str) -> None:
    report = interpreted[case]
    # Inductor decides whether a producer of both halves is a kernel apart.
    assert report["launches"] <= (4 if case in ("fused", "cast", "cast_float16") else 2), report["kernels"]
    assert_kernels(report, launches=report["launches"])


def test_a_consumer_is_part_of_a_kernel(interpreted: Reports) -> None:
    assert any("_to_copy_fused_q_kv_rmsnorm" in name for name in interpreted["fused"]["kernels"])


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    assert len(compiled["fused"]["binaries"][target]) >= 2
    assert all(size > 0 for size in compiled["fused"]["binaries"][target])


@pytest.mark.parametrize("case", ["fused", "cast", "cast_float16", "float32", "no_token"])
def test_cpp_equals_the_reference(case: str) -> None:
    assert_equals_reference(on_cpp(CASES[case]), steps=STEPS.get(case, 1))


def test_a_declined_call_says_why() -> None:
    arguments: dict[str, Any] = {"qr": torch.empty(3, 48), "kv": torch.empty(3, 24)}
    assert ir_decision("fused_q_kv_rmsnorm", CPP, **arguments).impl == "ir"
    decision = ir_decision("fused_q_kv_rmsnorm", HALIDE, **arguments)
    assert (decision.impl, decision.reason) == ("eager", "lowered for C++ and Triton, not for halide")
