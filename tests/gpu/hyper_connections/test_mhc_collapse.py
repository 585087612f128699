"""The kernel of `mhc_collapse` on a GPU against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import padded, poisoned_empty, samples, strided  # noqa: F401  (registers the ops)
from tests.kernels.hyper_connections.lagged import collapse, wrong_collapse

FLASH = 5120
COLLAPSE = launcher("mhc_collapse")


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty():
        out: Tensor = COLLAPSE(*args)
    assert wrong_collapse(args, out) == ""
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 6, 130, 3000])
@pytest.mark.parametrize("dim", [97, FLASH, 16384])
def test_results_are_those_in_float64_and_five_runs_have_the_same_bits(
    dim: int, tokens: int, dtype: torch.dtype
) -> None:
    args = collapse(tokens, dim, dtype, device="cuda", seed=tokens)
    want = check(args)
    assert all(torch.equal(COLLAPSE(*args), want) for _ in range(4))


@pytest.mark.parametrize("gain", [1e-8, 1e6, 1e15])
def test_streams_of_any_size(gain: float) -> None:
    check(collapse(40, FLASH, gain=gain, device="cuda"))


@pytest.mark.parametrize("spread", [padded, strided])
def test_strided_arguments_in_memory_full_of_nan(spread: Callable[[Tensor], Tensor]) -> None:
    args = collapse(40, 300, device="cuda")
    check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args))


def test_a_captured_launch_follows_its_inputs() -> None:
    args = collapse(6, FLASH, device="cuda")
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = COLLAPSE(*args)
    for old, new in zip(args[:2], collapse(6, FLASH, device="cuda", seed=7), strict=False):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, check(args))
