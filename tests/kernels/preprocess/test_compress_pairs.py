"""The kernel of `compress_pairs` against the reference, every access checked, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.preprocess import compress_pairs as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close, padded, poison_, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked, random_program_order
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
reference = REFERENCES["compress_pairs"]
STATE, EPS = 2, 1e-20
NEIGHBOURS = {
    # A pooled value that rounds to its neighbour moves its latent, which is rounded again.
    torch.float32: Tolerance(abs=1e-6, rel=1e-5, cosine=1e-12),
    torch.bfloat16: Tolerance(abs=1e-6, rel=2.02 / 128, cosine=1e-6),
    torch.float16: Tolerance(abs=1e-6, rel=2.02 / 1024, cosine=1e-8),
}


def storage(state: Tensor) -> Tensor:
    """Return all of the memory behind the state, between its rows too."""
    return torch.empty(0, dtype=torch.uint8).set_(state.untyped_storage())


def copied(state: Tensor) -> Tensor:
    """Return a copy with the same strides and the same memory between its elements."""
    return storage(state).clone().view(state.dtype).as_strided(state.shape, state.stride(), state.storage_offset())


def check(*args: Any) -> Tensor:
    """Run both. All memory behind the states must be equal, and latents at most neighbours. Return the latents."""
    ours, theirs = copied(args[STATE]), copied(args[STATE])
    with checked(mutated=("p_out", "p_state")) as launched, random_program_order():
        got = kernel.compress_pairs(*args[:STATE], ours, *args[STATE + 1 :])
    want = reference(*args[:STATE], theirs, *args[STATE + 1 :])
    tokens, ring = len(args[0]), args[STATE].shape[1]
    assert launched == ["compress_pairs_kernel"] * (1 if tokens == 1 and ring > 1 else 2 * (tokens > 0))
    assert_bitwise(storage(ours), storage(theirs), label="state")
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    assert torch.equal(got == 0, want == 0), "zeros at the same rows"
    assert_close(got, want, NEIGHBOURS[want.dtype])
    return got


def arguments(
    runs: Sequence[tuple[int, int, int]], dim: int = 24, ring: int = 8, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """Return arguments of a step: request, first position and tokens of each run; request -1 is padding."""
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in runs])
    requests = torch.cat([torch.full((count,), request) for request, _, count in runs])
    values, gates = torch.randn(2, len(positions), dim) * 2
    state = torch.randn(4, ring + 1, 2 * dim)[:, :ring]
    poison_(torch.empty(0).set_(state.untyped_storage()).view(4, ring + 1, 2 * dim)[:, ring])
    return [values, gates, state, positions, requests, (1 + torch.randn(dim) / 8).to(dtype), EPS]


MIXED = [(2, 7, 3), (-1, 0, 2), (0, 0, 1), (3, 12, 1), (1, 5, 6)]


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("compress_pairs"))))
def test_samples(number: int) -> None:
    check(*op_samples("compress_pairs")[number])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [1, 24, 512])
def test_runs_of_several_requests(dim: int, dtype: torch.dtype) -> None:
    check(*arguments(MIXED, dim, dtype=dtype))


@interpreted
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize(
    ("ring", "count"), [(1, 1), (1, 20), (2, 2), (2, 9), (3, 2), (3, 7), (8, 7), (8, 8), (8, 9), (8, 20)]
)
def test_a_run_longer_than_its_ring_reads_it_first_and_keeps_the_last_rows(ring: int, count: int, start: int) -> None:
    check(*arguments([(1, start, count), (2, 3, 2)], dim=5, ring=ring))


@interpreted
def test_positions_with_gaps_read_the_state() -> None:
    args = arguments([(1, 3, 1), (1, 6, 2), (1, 11, 1), (1, 19, 1), (1, 20, 2)])
    check(*args)


@interpreted
def test_unused_rows_of_nan_stay_out_of_latents() -> None:
    args = arguments(MIXED)
    used = args[STATE][2, 6].clone(), args[STATE][1, 4].clone(), args[STATE][3, 3].clone()
    args[STATE].fill_(torch.nan)
    args[STATE][2, 6], args[STATE][1, 4] = used[:2]
    latents = check(*args)
    assert not latents.isnan().any()


@interpreted
def test_hostile_positions_and_requests_touch_nothing() -> None:
    args = arguments([(0, 1, 12)])
    args[4] = torch.tensor([-1, 4, 2**40, -(2**40), 0, 9, 0, -7, 1, 5, 2, 3])
    args[3] = torch.tensor([1, 1, 1, 1, -1, 3, -(2**40), 5, 2**40 + 1, 7, 0, 9])
    args[0][0], args[1][1] = torch.nan, torch.inf
    check(*args)
    args[4].fill_(-1)
    before = args[STATE].clone()
    assert check(*args).abs().max() == 0
    assert_bitwise(args[STATE], before)


@interpreted
@pytest.mark.parametrize("runs", [[(0, 0, 0)], [(3, 4, 1)], [(3, 5, 1)], [(-1, 0, 1)]])
def test_no_token_and_one(runs: list[tuple[int, int, int]]) -> None:
    check(*arguments(runs))
    check(*arguments(runs, ring=1))


@interpreted
def test_no_request_has_a_state() -> None:
    args = arguments(MIXED)
    args[STATE] = args[STATE][:0]
    check(*args)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides_and_int32(spread: Callable[[Tensor], Tensor]) -> None:
    values, gates, state, positions, requests, weight, eps = arguments(MIXED)
    check(*map(spread, (values, gates, state, positions.int(), requests.int(), weight)), eps)


@interpreted
def test_large_gates_and_zero_rows() -> None:
    args = arguments(MIXED, dtype=torch.float32)
    args[0][0:2], args[1][4:] = 0, args[1][4:] * 100
    check(*args)


def test_unsupported_calls_have_a_reason() -> None:
    def why(dim: int, ring: int) -> str:
        return kernel.why_unsupported_compress_pairs(*arguments([(0, 0, 1)], dim, ring))

    assert why(512, 8) == why(kernel.MAX_DIM, 2) == ""
    assert f"{kernel.MAX_DIM + 1} channels" in why(kernel.MAX_DIM + 1, 2)
    assert f"{kernel.MAX_ROWS + 1} rows" in why(8, kernel.MAX_ROWS + 1)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        for tokens in (1, 5):
            kernel.compress_pairs(*arguments([(0, 3, tokens)], 512))
    assert len(compiled) == 3
    assert all(binary.assembled and begins_early(binary) == early for binary in compiled)
