"""Kernels of `mhc_mixes` on a GPU against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import padded, poisoned_empty, samples, strided  # noqa: F401  (registers the ops)
from tests.kernels.hyper_connections.lagged import mixes, wrong_mixes

FLASH = 5120
MIXES = launcher("mhc_mixes")


def check(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with poisoned_empty():
        results: tuple[Tensor, ...] = MIXES(*args)
    assert wrong_mixes(args, results) == ""
    return results


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 32, 129, 512, 1100])
def test_coefficients_are_those_in_float64_and_five_runs_have_the_same_bits(tokens: int) -> None:
    args = mixes(tokens, FLASH, iterations=20, device="cuda", seed=tokens)
    want = check(args)
    for _ in range(4):
        assert all(map(torch.equal, MIXES(*args), want))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("dim", [97, FLASH])
def test_other_dtypes_and_numbers_of_channels(dim: int, tokens: int, dtype: torch.dtype) -> None:
    check(mixes(tokens, dim, dtype, device="cuda"))


@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_strided_arguments_in_memory_full_of_nan(tokens: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = mixes(tokens, 300, device="cuda")
    check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args))


@pytest.mark.parametrize("gain", [0.0, 1e-8, 1e6, 1e15])
@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_streams_of_any_size(tokens: int, gain: float) -> None:
    check(mixes(tokens, FLASH, gain=gain, device="cuda"))


@pytest.mark.parametrize("tokens", [1, 8, 64, 400])
def test_a_captured_launch_follows_its_inputs(tokens: int) -> None:
    args = mixes(tokens, FLASH, device="cuda")
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = MIXES(*args)
    args[0].copy_(mixes(tokens, FLASH, device="cuda", seed=7)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, check(args)))
