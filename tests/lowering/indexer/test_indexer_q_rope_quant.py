"""The lowering of `indexer_q_rope_quant`: its Triton and C++, and their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.lowering import registry
from dsv4_compile.options import Options
from dsv4_compile.selection import proven
from dsv4_compile.selection.decisions import Call
from tests.lowering.claims import CPP, SM80, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.generated import on_cpp
from tests.lowering.indexer.cases_indexer_q_rope_quant import CASES


@pytest.mark.parametrize("case", list(CASES))
def test_triton_gives_the_bytes_of_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", list(CASES))
def test_queries_are_one_kernel_and_hold_the_weights_where_those_need_the_scale(
    interpreted: Reports, case: str
) -> None:
    queries = 0 if "no_token" in case else 1 if case.startswith("fp8") else 2
    # In front of the transform rotated queries are stored, and its sums are a kernel too.
    assert_kernels(interpreted[case], launches=queries + 2 * case.endswith("hadamard"))


@pytest.mark.parametrize("case", ["fp8", "mxfp4", "plain"])
def test_producer_and_consumer_are_part_of_the_kernels(interpreted: Reports, case: str) -> None:
    assert all("mul" in name and "indexer_q_rope_quant" in name for name in interpreted[case]["kernels"])


@pytest.mark.parametrize("case", ["fp8", "mxfp4"])
def test_a_query_is_read_into_registers_once(interpreted: Reports, case: str) -> None:
    assert interpreted[case]["kernels"][0].startswith("triton_per_")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    for case, kernels in (("fp8", 1), ("mxfp4", 2)):
        assert len(compiled[case]["binaries"][target]) == kernels
        assert all(size > 0 for size in compiled[case]["binaries"][target])


@pytest.mark.parametrize("case", ["fp8", "mxfp4", "plain", "fp8_hostile", "fp8_rounded", "plain_no_token"])
def test_cpp_equals_the_reference(case: str) -> None:
    assert_equals_reference(on_cpp(CASES[case]))


def test_a_declined_call_says_why() -> None:
    arguments: dict[str, Any] = {"q": torch.empty(3, 4, 128), "cos_sin_cache": torch.empty(8, 64)}
    arguments |= {"cache_format": "indexer_fp8"}
    op = "indexer_q_rope_quant"
    assert ir_decision(op, CPP, **arguments).impl == "ir"
    assert "Triton converts to e4m3 from sm_89 on" in ir_decision(op, SM80, **arguments).reason
    assert ir_decision(op, SM80, **{**arguments, "cache_format": "indexer_mxfp4"}).impl == "ir"
    transform = {**arguments, "hadamard": True}
    assert ir_decision(op, **transform).impl == "ir"
    assert "faster as calls of torch" in ir_decision(op, CPP, **transform).reason


@pytest.mark.parametrize(("hadamard", "expected"), [(False, "ir"), (True, "triton")])
def test_auto_leaves_the_transform_to_a_kernel_that_transforms_within(
    monkeypatch: pytest.MonkeyPatch, hadamard: bool, expected: str
) -> None:
    monkeypatch.setattr(registry.measured, "nearest", lambda *_: {"ir": 1.0, "triton": 2.0})
    arguments = {"q": torch.empty(3, 4, 128), "cos_sin_cache": torch.empty(8, 64), "hadamard": hadamard}
    call = Call(
        "indexer_q_rope_quant", arguments | {"cache_format": "plain"}, torch.device("cuda"), "triton", "cuda sm_90"
    )
    registry.load()
    with proven.trust():
        assert registry.decide(call, Options()).impl == expected
