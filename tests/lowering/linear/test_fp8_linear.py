"""The lowering of `fp8_linear`: a quantisation that fuses with the producer of its input, and the product behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.claims import CPP, SM80, Reports, assert_equals_reference, ir_decision
from tests.lowering.linear.cases_fp8_linear import CASES, ROWS, WIDTH


@pytest.mark.parametrize("case", list(CASES))
def test_products_are_those_of_the_reference(interpreted: Reports, case: str) -> None:
    # The product is the same reference on both sides, so that equal results are equal operands. Empty results have
    # Inductor's strides, and a norm adds in a different order.
    assert_equals_reference(interpreted[case], steps=1 if case in ("normed", "no_token") else 0)


@pytest.mark.parametrize("case", list(CASES))
def test_the_quantisation_is_one_kernel_and_the_product_one_call(interpreted: Reports, case: str) -> None:
    report = interpreted[case]
    # The sum of the norm and the other half of it in front, the scaled result behind.
    kernels = {"no_token": 0, "normed": 3, "produced": 2}.get(case, 1)
    assert (report["graphs"], report["launches"]) == (1, kernels), report["kernels"]
    (product,) = [line for line in report["extern"] if not line.startswith("assert_")]
    assert "fp8_grouped_einsum" in product


def test_what_normalises_or_scales_the_input_is_part_of_the_kernel_that_quantises_it(interpreted: Reports) -> None:
    assert any("mul" in name and "fp8_linear" in name for name in interpreted["produced"]["kernels"])
    names = interpreted["normed"]["kernels"]  # the sum of the norm, then its other half with the quantisation
    assert len(names) == 3 and "fp8_linear" not in names[0] and "fp8_linear" in names[1], names


def test_a_strip_is_read_into_registers_once(interpreted: Reports) -> None:
    assert interpreted["linear"]["kernels"][0].startswith("triton_per_")


def test_a_declined_call_says_why() -> None:
    op, x = "fp8_linear", torch.empty(3, WIDTH, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"x": x, "weight": torch.empty(ROWS, WIDTH), "quantize_input": True, "beside": None}
    assert ir_decision(op, **arguments).impl == "ir"
    assert "Triton converts to e4m3 from sm_89 on" in ir_decision(op, SM80, **arguments).reason
    assert "one element at a time" in ir_decision(op, CPP, **arguments).reason
    assert "not quantised" in ir_decision(op, **arguments | {"quantize_input": False}).reason
    assert "a single weight" in ir_decision(op, **arguments | {"x": x.float()}).reason
    assert "strips of 128" in ir_decision(op, **arguments | {"x": x[:, :200]}).reason
