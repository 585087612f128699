"""Kernels of `mhc_boundary`, `mhc_pre` and `mhc_head` on a GPU against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.arguments import packed
from dsv4_compile.testing import padded, poisoned_empty, samples, strided  # noqa: F401  (registers the ops)
from tests.kernels.hyper_connections.calls import OPS, arguments, results, wrong

FLASH, PRO = 4096, 7168
TOKENS = (1, 2, 8, 9, 32, 129, 512, 1100)


def launch(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    module = importlib.import_module(f"dsv4_compile.kernels.hyper_connections.{op}")
    return results(packed(op, getattr(module, op))(*args))


def check(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    with poisoned_empty():
        got = launch(op, args)
    assert wrong(op, args, got) == ""
    return got


@pytest.mark.parametrize("dim", [FLASH, PRO])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", OPS)
def test_results_are_those_in_float64_and_five_runs_have_the_same_bits(op: str, tokens: int, dim: int) -> None:
    args = arguments(op, tokens, dim, device="cuda", seed=tokens)
    want = check(op, args)
    for _ in range(4):
        assert all(map(torch.equal, launch(op, args), want))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("dim", [97, FLASH])
def test_other_dtypes_and_numbers_of_channels(dim: int, tokens: int, dtype: torch.dtype) -> None:
    check("mhc_boundary", arguments("mhc_boundary", tokens, dim, dtype, device="cuda"))


@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_strided_arguments_in_memory_full_of_nan(tokens: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments("mhc_boundary", tokens, 300, device="cuda")
    check("mhc_boundary", tuple(spread(x) if isinstance(x, Tensor) else x for x in args))


@pytest.mark.parametrize("gain", [0.0, 1e-12, 1e6, 1e15])
@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_streams_of_any_size(tokens: int, gain: float) -> None:
    check("mhc_boundary", arguments("mhc_boundary", tokens, FLASH, gain=gain, device="cuda"))


@pytest.mark.parametrize("tokens", [20_000])
def test_many_tokens(tokens: int) -> None:
    args = arguments("mhc_boundary", tokens, FLASH, device="cuda")
    got = launch("mhc_boundary", args)
    last = slice(tokens - 70, tokens)
    few = (*(x[last] for x in args[:4]), *args[4:])
    assert wrong("mhc_boundary", few, [x[last].contiguous() for x in got]) == ""


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_a_captured_chain_of_boundaries_follows_its_inputs(tokens: int) -> None:
    """40 boundaries, one after the other with PDL, each on the results of the one before."""
    args = arguments("mhc_boundary", tokens, FLASH, device="cuda")

    def chain() -> list[Tensor]:
        state = list(args[:4])
        for _ in range(40):
            streams, y, post, comb = launch("mhc_boundary", (*state, *args[4:]))
            state = [streams, y, post, comb]
        return state

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed in range(3):
        for mine, other in zip(
            args[:4], arguments("mhc_boundary", tokens, FLASH, device="cuda", seed=seed), strict=False
        ):
            mine.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, chain()))


def test_launches_on_many_streams_at_once_end_and_agree() -> None:
    """More launches at once than fit on a GPU that is busy already: nobody waits for a CTA to start."""
    calls = [arguments("mhc_boundary", tokens, FLASH, device="cuda", seed=tokens) for tokens in range(1, 9)] * 4
    want = [launch("mhc_boundary", args) for args in calls]
    busy = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(4):
        busy = torch.tanh(busy @ busy)
    for _ in range(10):
        got = []
        for stream, args in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                got.append(launch("mhc_boundary", args))
    torch.cuda.synchronize()
    for actual, expected in zip(got, want, strict=True):
        assert all(map(torch.equal, actual, expected))
