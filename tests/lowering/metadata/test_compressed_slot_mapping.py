"""The lowering of `compressed_slot_mapping`: its Triton and C++, and their results."""

from __future__ import annotations

import pytest

from tests.lowering.claims import CPP, HALIDE, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.generated import on_cpp
from tests.lowering.metadata.cases_compressed_slot_mapping import CASES


@pytest.mark.parametrize("case", list(CASES))
def test_triton_fills_all_of_out_as_the_reference_does(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_one_kernel_for_any_number_of_requests(interpreted: Reports, case: str) -> None:
    # Without a token there is still padding to write.
    assert_kernels(interpreted[case], launches=1)


def test_producer_and_consumer_are_part_of_the_kernel(interpreted: Reports) -> None:
    (kernel,) = interpreted["fused"]["kernels"]
    assert all(name in kernel for name in ("mul", "compressed_slot_mapping", "add"))


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    (size,) = compiled["slots"]["binaries"][target]
    assert size > 0


@pytest.mark.parametrize("case", ["slots", "any_batch", "no_token"])
def test_cpp_equals_the_reference(case: str) -> None:
    assert_equals_reference(on_cpp(CASES[case]))


def test_a_declined_call_says_why() -> None:
    assert ir_decision("compressed_slot_mapping", CPP).impl == "ir"
    assert "not for halide" in ir_decision("compressed_slot_mapping", HALIDE).reason
