"""The lowerings of `inv_rope` and `inv_rope_fp8_quant`: generated Triton and C++, and their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.attention.cases_inv_rope import CASES
from tests.lowering.claims import CPP, SM80, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.generated import on_cpp

# Packed scales combine the bytes of four tiles, and a consumer reads values stored by tile: a kernel each.
LAUNCHES = {"no_token": 0, "packed": 2, "three_tiles": 2, "produced": 2}


@pytest.mark.parametrize("case", list(CASES))
def test_triton_gives_the_bytes_and_strides_of_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", list(CASES))
def test_rotation_values_and_scales_are_one_kernel_and_the_output_of_attention_is_not_copied(
    interpreted: Reports, case: str
) -> None:
    assert_kernels(interpreted[case], launches=LAUNCHES.get(case, 1))


def test_producer_and_consumer_are_part_of_the_kernel(interpreted: Reports) -> None:
    (rotation,) = interpreted["rotate"]["kernels"]
    assert "mul" in rotation and "inv_rope" in rotation
    assert "mul" in interpreted["produced"]["kernels"][0]


def test_a_tile_is_read_into_registers_once(interpreted: Reports) -> None:
    assert interpreted["quantize"]["kernels"][0].startswith("triton_per_")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    for case, kernels in (("rotate", 1), ("quantize", 1), ("packed", 2)):
        assert len(compiled[case]["binaries"][target]) == kernels
        assert all(size > 0 for size in compiled[case]["binaries"][target])


@pytest.mark.parametrize("case", ["rotate", "three_tiles", "no_token"])
def test_cpp_equals_the_reference(case: str) -> None:
    assert_equals_reference(on_cpp(CASES[case]))


def test_an_unsupported_call_says_why() -> None:
    arguments: dict[str, Any] = {"o": torch.empty(3, 4, 64), "cos_sin_cache": torch.empty(8, 16)}
    odd = {**arguments, "o": torch.empty(3, 4, 63)}
    assert ir_decision("inv_rope", SM80, **arguments).impl == "ir"
    assert ir_decision("inv_rope_fp8_quant", CPP, **arguments).impl == "ir"
    assert "Triton converts to e4m3 from sm_89 on" in ir_decision("inv_rope_fp8_quant", SM80, **arguments).reason
    assert ir_decision("inv_rope", **odd).reason == "the head dim is odd"
