"""The kernel of `compress_pairs` on a GPU against the reference on the same GPU: every byte of state, and latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.preprocess import compress_pairs as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)
from tests.gpu.preprocess.test_q_norm_rope import generator, same_bytes

REFERENCE = REFERENCES["compress_pairs"]
EPS = 1e-20
STEPS = {torch.bfloat16: 1 / 128, torch.float16: 1 / 1024, torch.float32: 1e-5}
"""Relative distance of neighbours."""
FLIPPED_SHARE = 2e-4
"""Share of latents that may be neighbours' neighbours: a pooled value rounded up, then its latent."""


def agree(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    step, size = STEPS[want.dtype], want.float().abs()
    apart = (got.float() - want.float()).abs()
    assert bool((apart <= 2.02 * step * size + 1e-6).all())
    assert int((apart > 1.01 * step * size + 1e-6).sum()) <= 2 + FLIPPED_SHARE * want.numel()


def compare(args: tuple[Any, ...]) -> None:
    values, gates, state, *rest = args
    ours, theirs = state.clone(), state.clone()
    got, want = kernel.compress_pairs(values, gates, ours, *rest), REFERENCE(values, gates, theirs, *rest)
    assert same_bytes(ours, theirs)
    agree(got, want)


def arguments(
    tokens: int, run: int, dim: int = 512, ring: int = 8, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, ...]:
    """Return arguments of a step of runs of `run` tokens, some of them padding, values and gates of one projection."""
    row = torch.arange(tokens, device="cuda")
    requests = torch.where(row // run % 7 == 6, -1, row // run)
    starts = torch.randint(50, (tokens // run + 1,), device="cuda", generator=generator(tokens))
    positions = starts[row // run] + row % run
    projection = torch.randn(tokens, 2 * dim, device="cuda", generator=generator(tokens + 1)) * 2
    state = torch.randn(tokens // run + 1, ring, 2 * dim, device="cuda", generator=generator(3))
    weight = 1 + torch.randn(dim, device="cuda", generator=generator(4)) / 8
    return *projection.chunk(2, 1), state, positions, requests, weight.to(dtype), EPS


@pytest.mark.parametrize("tokens", [0, 1, 2, 32, 192, 1024, 4099])
@pytest.mark.parametrize("run", [1, 6, 5000])
def test_states_are_exact_and_latents_neighbours(tokens: int, run: int) -> None:
    compare(arguments(tokens, run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "ring"), [(1, 2), (40, 3), (512, 1), (8192, 16)])
def test_other_sizes_and_dtypes(dim: int, ring: int, dtype: torch.dtype) -> None:
    for run in (1, 3, 50):
        compare(arguments(77, run, dim, ring, dtype))


def test_one_row_a_run_is_read_before_it_is_written() -> None:
    """Every request reads the row that its last token writes, many times over, so that a race would show."""
    for _ in range(20):
        values, gates, state, _, requests, *rest = arguments(2048, 8)
        positions = 1 + torch.arange(2048, device="cuda") % 8
        compare((values, gates, state, positions, requests, *rest))


def test_large_gates_zero_rows_and_unused_state_of_nan() -> None:
    values, gates, state, _, requests, *rest = arguments(300, 6)
    values[::3], gates[1::2] = 0, gates[1::2] * 1000
    row = torch.arange(300, device="cuda")
    positions = row // 6 * 2 + row % 6  # every run begins at an even position
    state.fill_(torch.nan)
    compare((values, gates, state, positions, requests, *rest))


def test_a_captured_launch_follows_its_inputs() -> None:
    values, gates, state, positions, requests, *rest = arguments(40, 6)
    values, gates = values.clone(), gates.clone()

    def step() -> Tensor:
        return kernel.compress_pairs(values, gates, state, positions, requests, *rest)

    first = state.clone()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        values.copy_(torch.randn(values.shape, device="cuda", generator=generator(seed)))
        positions += 1
        results = []
        for replays in (True, False):
            state.copy_(first)
            if replays:
                graph.replay()
            results.append((captured.clone() if replays else step(), state.clone()))
        assert all(map(torch.equal, *results))
