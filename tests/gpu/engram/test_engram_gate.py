"""The kernel of `engram_gate` on a GPU against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import padded, poisoned_empty, samples, strided  # noqa: F401  (registers the ops)
from tests.kernels.engram.gates import arguments, wrong

FLASH = 5120
GATE = launcher("engram_gate")


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty():
        out: Tensor = GATE(*args)
    assert wrong(args, out) == ""
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 6, 130, 2000])
@pytest.mark.parametrize("dim", [97, FLASH, 16384])
def test_results_are_those_in_float64_and_five_runs_have_the_same_bits(
    dim: int, tokens: int, dtype: torch.dtype
) -> None:
    args = arguments(tokens, dim, dtype, device="cuda", seed=tokens)
    want = check(args)
    assert all(torch.equal(GATE(*args), want) for _ in range(4))


@pytest.mark.parametrize("gain", [0.0, 1e-8, 1e4])
def test_streams_of_any_size(gain: float) -> None:
    check(arguments(40, FLASH, torch.float32, gain=gain, device="cuda"))


@pytest.mark.parametrize("spread", [padded, strided])
def test_strided_arguments_in_memory_full_of_nan(spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments(40, 300, device="cuda")
    check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args))


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments(6, FLASH, device="cuda")
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = GATE(*args)
    for old, new in zip(args[:2], arguments(6, FLASH, device="cuda", seed=7), strict=False):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, check(args))


def test_a_dot_of_negative_zeros_is_positive() -> None:
    """A gate of a half and a quarter of 1e-3 more, not less."""
    streams, keys = torch.full((1, 4, 8), -0.0, device="cuda"), torch.full((1, 40), 4096.0, device="cuda")
    ones, image = torch.ones(4, 8, device="cuda"), torch.zeros(1, dtype=torch.bool, device="cuda")
    assert (check((streams, keys, ones, ones, image, 1e-20)) > 2048.5).all()
