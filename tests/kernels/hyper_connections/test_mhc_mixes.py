"""Kernels of `mhc_mixes` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.hyper_connections import mhc_boundary as boundary
from dsv4_compile.kernels.hyper_connections import mhc_mixes as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import refusal
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.kernels.hyper_connections.calls import COEFFICIENTS
from tests.kernels.hyper_connections.lagged import mixes, wrong_mixes
from tests.kernels.hyper_connections.test_mhc_boundary import disorder
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
MUTATED = "p_sums", "p_counters", "p_parts", *(f"results[{i}]" for i in range(3))
FEW, SOME, TWO_TILES, MANY = 2, 3, boundary.TILE_TOKENS + 1, boundary.TILE_TOKENS + 2
"""Tokens of one launch; of one and two tiles of few tokens; of two tiles of many tokens."""
MANY_TILE_TOKENS = boundary.MANY_TILE_TOKENS


@pytest.fixture(autouse=True)
def few_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the limits where few programs are beyond them: in the interpreter each takes time."""
    monkeypatch.setattr(boundary, "MAX_ONE_LAUNCH", FEW)
    monkeypatch.setattr(boundary, "FEW_TOKENS", TWO_TILES)
    monkeypatch.setattr(boundary, "MANY_TILE_TOKENS", boundary.TILE_TOKENS)


def launch(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], list[str]]:
    with poisoned_empty(), checked(mutated=MUTATED) as launched:
        return kernels.mhc_mixes(*args), launched


def kernels_of(tokens: int, dtype: torch.dtype) -> list[str]:
    """Return the kernels that a call launches."""
    if tokens <= FEW:
        return ["mhc_mixes_kernel"] if tokens else []
    if dtype is not torch.bfloat16:
        return ["mhc_mixes_kernel", "mhc_coefficients_kernel"]
    few = ["mhc_tokens_kernel"] if tokens <= TWO_TILES else ["mhc_fn_kernel", "mhc_many_tokens_kernel"]
    return [*few, "mhc_coefficients_kernel"]


def check(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    results, launched = launch(args)
    assert launched == kernels_of(len(args[0]), args[0].dtype)
    assert wrong_mixes(args, results) == ""
    return results


@interpreted
@pytest.mark.parametrize("number", [0, 2])
def test_samples(number: int) -> None:
    args = op_samples("mhc_mixes")[number]
    for got, want in zip(launch(args)[0], REFERENCES["mhc_mixes"](*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=COEFFICIENTS)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((tokens, dtype) for tokens in (0, 1, SOME) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (TWO_TILES, torch.bfloat16),
        (MANY, torch.bfloat16),
        (MANY, torch.float32),
    ],
)
def test_coefficients_are_those_in_float64(tokens: int, dtype: torch.dtype) -> None:
    check(mixes(tokens, 80, dtype))


@interpreted
@pytest.mark.parametrize("dim", [1, 128, 300])
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_any_number_of_channels(tokens: int, dim: int) -> None:
    check(mixes(tokens, dim))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_strided_arguments_in_memory_full_of_nan(tokens: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = mixes(tokens, 144)
    want, _ = launch(args)
    results = check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args))
    for got, expected in zip(results, want, strict=True):
        assert_bitwise(got, expected)


@interpreted
@pytest.mark.parametrize("gain", [0.0, 1e-8, 1e6, 1e15])
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_streams_of_any_size(tokens: int, gain: float) -> None:
    """Streams of 1e-8 keep their norm with an eps of 1e-20, and streams of zeros give the base."""
    check(mixes(tokens, 144, gain=gain))


@interpreted
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_iterations(iterations: int) -> None:
    check(mixes(FEW, iterations=iterations))
    check(mixes(MANY, iterations=iterations))


@interpreted
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_both_eps_count(tokens: int) -> None:
    check((*mixes(tokens)[:4], 0.5, 0.125, 3))


@interpreted
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_a_token_of_nan_keeps_to_itself(tokens: int) -> None:
    args = mixes(tokens, 144)
    want, _ = launch(args)
    args[0][1, 2, 5] = torch.nan
    results, _ = launch(args)
    others = torch.arange(tokens) != 1
    for got, expected in zip(results, want, strict=True):
        assert_bitwise(got[others], expected[others])
        assert got[1].isnan().any()


@interpreted
@pytest.mark.parametrize("tokens", [FEW, SOME, TWO_TILES, MANY])
def test_programs_may_run_in_any_order_and_one_by_one(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = mixes(tokens, 300)
    want, _ = launch(args)
    for shuffle in (list.reverse, random.Random(1).shuffle):
        with disorder(monkeypatch, shuffle):
            results, _ = launch(args)
        for got, expected in zip(results, want, strict=True):
            assert_bitwise(got, expected)


@interpreted
def test_counters_are_zero_again_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(FEW, dtype=torch.int32)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: counters)
    for _ in range(2):
        check(mixes(FEW, 300))
        assert not counters.any()


def test_other_numbers_of_streams_are_unsupported() -> None:
    why = refusal("mhc_mixes")
    assert why is not None and why(*mixes(2)) == ""
    assert why(*op_samples("mhc_mixes")[1]) == "3 streams, the kernels are written for 4"
    assert f"{boundary.MAX_DIM + 1} channels" in why(torch.empty(2, 4, boundary.MAX_DIM + 1), *mixes(2)[1:])


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_kernels_compile_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    monkeypatch.setattr(boundary, "MANY_TILE_TOKENS", MANY_TILE_TOKENS)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: torch.zeros(count, dtype=torch.int32))
    with compiled_for(target) as compiled:
        for tokens in (1, SOME, MANY):
            kernels.mhc_mixes(*mixes(tokens, 5120))
    assert len(compiled) == 1 + 2 + 3
    assert all(kernel.assembled for kernel in compiled)
    assert all(begins_early(kernel) == early for kernel in compiled)
