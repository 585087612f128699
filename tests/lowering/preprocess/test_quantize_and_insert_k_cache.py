"""The lowering of `quantize_and_insert_k_cache`: its Triton, and the stored bytes."""

from __future__ import annotations

import pytest

from tests.lowering.claims import CPP, SM80, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.preprocess.cases_quantize_and_insert_k_cache import CASES


@pytest.mark.parametrize("case", list(CASES))
def test_every_byte_behind_the_cache_is_that_of_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_one_kernel_and_the_cache_is_not_copied(interpreted: Reports, case: str) -> None:
    assert_kernels(interpreted[case], launches=0 if case == "no_token" else 1)


def test_the_producer_is_part_of_the_kernel(interpreted: Reports) -> None:
    (kernel,) = interpreted["produced"]["kernels"]
    assert "mul" in kernel and "quantize_and_insert_k_cache" in kernel


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    (size,) = compiled["insert"]["binaries"][target]
    assert size > 0


def test_a_declined_call_says_why() -> None:
    op = "quantize_and_insert_k_cache"
    assert ir_decision(op).impl == "ir"
    assert ir_decision(op, CPP).reason == "the C++ backend cannot predicate stores"
    assert "Triton converts to e4m3 from sm_89 on" in ir_decision(op, SM80).reason
