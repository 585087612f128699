"""The lowering of `save_partial_states`: its Triton, and the stored bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lowering.claims import CPP, SM80, TARGETS, Reports, assert_equals_reference, assert_kernels, ir_decision
from tests.lowering.preprocess.cases_save_partial_states import CASES


@pytest.mark.parametrize("case", list(CASES))
def test_every_byte_behind_the_cache_is_that_of_the_reference(interpreted: Reports, case: str) -> None:
    assert_equals_reference(interpreted[case])


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_one_kernel_and_neither_projection_nor_cache_is_copied(interpreted: Reports, case: str) -> None:
    # The readers of the cache in front of the write and behind it are separate kernels.
    assert_kernels(interpreted[case], launches={"no_token": 0, "produced": 3}.get(case, 1))


def test_the_producer_is_part_of_the_kernel(interpreted: Reports) -> None:
    write = interpreted["produced"]["kernels"][1]
    assert "mul" in write and "save_partial_states" in write


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    for case in ("ratio_4", "ratio_128"):
        (size,) = compiled[case]["binaries"][target]
        assert size > 0


def test_a_declined_call_says_why() -> None:
    arguments: dict[str, Any] = {"ape": torch.empty(4, 32)}
    assert ir_decision("save_partial_states", SM80, **arguments).impl == "ir"
    assert ir_decision("save_partial_states", CPP, **arguments).reason == "the C++ backend cannot predicate stores"
