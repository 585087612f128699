"""The lowering of `compress_norm_rope_insert`: its Triton, and the stored bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile._compat import torch_release
from tests.lowering.claims import CPP, SM80, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.preprocess.cases_compress_norm_rope_insert import CASES

ROWS = ["float32_rows", "without_scores"]
BYTES = [case for case in CASES if case not in ROWS]
LAUNCHES = {"no_token": 0, "saved": 4} | dict.fromkeys(ROWS, 3 if torch_release() < (2, 14) else 2)
LAUNCHES |= dict.fromkeys(("indexer_fp8", "fp8_rows", "all_padding"), 2)
LAUNCHES |= {"indexer_fp8_hadamard": 4, "indexer_mxfp4_hadamard": 4, "rows_of_another_ratio_hadamard": 3}


@pytest.mark.parametrize("case", BYTES)
def test_every_byte_behind_the_cache_is_that_of_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", ROWS)
def test_float32_rows_are_those_of_the_reference_but_for_their_last_bits(interpreted: Reports, case: str) -> None:
    # Sums in a different order, and exponentials of a second library.
    ((worst,),) = interpreted[case]["ulps"]
    assert worst <= 4
    assert interpreted[case]["impls"] == ["ir"]


@pytest.mark.parametrize("case", list(CASES))
def test_pool_norm_and_store_are_a_kernel_each_and_no_cache_is_copied(interpreted: Reports, case: str) -> None:
    # Where one program holds a whole entry, its norm is part of the store; a Hadamard transform is a kernel apart.
    assert_kernels(interpreted[case], launches=LAUNCHES.get(case, 3))


def test_what_saves_the_states_is_a_kernel_in_front_with_its_producer(interpreted: Reports) -> None:
    save = interpreted["saved"]["kernels"][0]
    assert "mul" in save and "save_partial_states" in save


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    for case in ("ratio_128", "indexer_fp8"):
        sizes = compiled[case]["binaries"][target]
        assert len(sizes) == LAUNCHES.get(case, 3)
        assert all(size > 0 for size in sizes)


def test_a_declined_call_says_why() -> None:
    arguments: dict[str, Any] = {
        "state_cache": torch.empty(2, 4, 2048),
        "norm_weight": torch.empty(512),
        "cos_sin_cache": torch.empty(8, 64),
        "cache_format": "fp8_ds_mla",
    }
    op = "compress_norm_rope_insert"
    assert ir_decision(op, **arguments).impl == "ir"
    assert ir_decision(op, CPP, **arguments).reason == "the C++ backend cannot predicate stores"
    assert "Triton converts to e4m3 from sm_89 on" in ir_decision(op, SM80, **arguments).reason
    assert ir_decision(op, SM80, **{**arguments, "cache_format": "indexer_mxfp4"}).impl == "ir"
    narrow = {**arguments, "cos_sin_cache": torch.empty(8, 32)}
    assert "for a rope dim of 64" in ir_decision(op, **narrow).reason
