"""Kernels of `mhc_boundary`, `mhc_pre` and `mhc_head` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile._compat import triton_interpreter
from dsv4_compile.kernels.host import semaphores
from dsv4_compile.kernels.hyper_connections import mhc_boundary as kernels
from dsv4_compile.ops.common.arguments import packed
from dsv4_compile.ops.common.define import OPS as TORCH_OPS
from dsv4_compile.ops.common.invariance import STEP, row_places
from dsv4_compile.ops.common.kernels import invariant_launcher
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from tests.kernels.gpus import begins_early, sees
from tests.kernels.hyper_connections import calls
from tests.kernels.hyper_connections.calls import OPS, exact, results, wrong
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
MUTATED = ("p_streams_out", "p_sums", "p_counters", "p_parts", *(f"results[{i}]" for i in range(3)))
arguments = partial(calls.arguments, iterations=4)
"""Few Sinkhorn iterations: the interpreter takes longest for them, and before they converge no error is hidden."""
FEW, SOME, TWO_TILES, MANY = 2, 3, kernels.TILE_TOKENS + 1, kernels.TILE_TOKENS + 2
"""Tokens, where tests put the limits: of one launch, of one and two tiles of few tokens, of two tiles of many."""
MANY_TILE_TOKENS = kernels.MANY_TILE_TOKENS
"""Tokens of such a tile when it is not interpreted."""


@pytest.fixture(autouse=True)
def few_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the limits where few programs are beyond them: in the interpreter each takes time."""
    monkeypatch.setattr(kernels, "MAX_ONE_LAUNCH", FEW)
    monkeypatch.setattr(kernels, "FEW_TOKENS", TWO_TILES)
    monkeypatch.setattr(kernels, "MANY_TILE_TOKENS", kernels.TILE_TOKENS)


def launcher(op: str) -> Callable[..., Any]:
    return packed(op, getattr(importlib.import_module(f"dsv4_compile.kernels.hyper_connections.{op}"), op))


def reductions(kernel: Any, shape: str) -> list[str]:
    """Return the layouts of the operands of a compiled kernel's reductions over tensors of a shape."""
    ttgir = kernel.asm["ttgir"]
    layouts = dict(ttgir.findall(r"(?m)^(#blocked\d*) = (#ttg\.blocked<.*>)$"))
    names = ttgir.findall(rf"\}}\) : \(tensor<\d+{shape}, (#blocked\d*)>\) -> ")
    return [layouts[name] for name in names]


def launch(op: str, args: tuple[Any, ...]) -> tuple[list[Tensor], list[str]]:
    with poisoned_empty(), checked(mutated=MUTATED) as launched:
        return results(launcher(op)(*args)), launched


def kernels_of(tokens: int, dtype: torch.dtype) -> list[str]:
    """Return the kernels that a call launches."""
    if tokens <= FEW:
        return ["mhc_token_kernel"] if tokens else []
    if dtype is not torch.bfloat16:
        return ["mhc_token_kernel", "mhc_finish_kernel"]
    few = ["mhc_tokens_kernel"] if tokens <= TWO_TILES else ["mhc_fn_kernel", "mhc_many_tokens_kernel"]
    return [*few, "mhc_finish_kernel"]


def check(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    got, launched = launch(op, args)
    tokens, dtype = len(args[0]), args[0].dtype
    assert launched == kernels_of(tokens, dtype)
    assert wrong(op, args, got) == ""
    return got


@interpreted
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        (0, torch.bfloat16),
        (1, torch.float16),
        *((SOME, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (TWO_TILES, torch.bfloat16),
        (MANY, torch.bfloat16),
        (MANY, torch.float32),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_results_are_those_in_float64(op: str, tokens: int, dtype: torch.dtype) -> None:
    check(op, arguments(op, tokens, 80, dtype))


@interpreted
@pytest.mark.parametrize(("tokens", "dim"), [(FEW, 1), (FEW, 300), (SOME, 128), (SOME, 1), (MANY, 300), (MANY, 128)])
@pytest.mark.parametrize("op", ["mhc_boundary", "mhc_head"])
def test_any_number_of_channels(op: str, tokens: int, dim: int) -> None:
    check(op, arguments(op, tokens, dim))


@interpreted
@pytest.mark.parametrize("op", ["mhc_pre", "mhc_head"])
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_streams_without_an_output_are_read_where_they_are(op: str, tokens: int) -> None:
    args = arguments(op, tokens, 144)[:7]
    before = args[0].clone()
    check(op, args)
    assert_bitwise(args[0], before)


@interpreted
@pytest.mark.parametrize(("tokens", "spread"), [(FEW, padded), (SOME, strided), (MANY, padded), (MANY, strided)])
@pytest.mark.parametrize("op", OPS)
def test_strided_arguments_in_memory_full_of_nan(op: str, tokens: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments(op, tokens, 144)
    want, _ = launch(op, args)
    for got, expected in zip(
        check(op, tuple(spread(x) if isinstance(x, Tensor) else x for x in args)), want, strict=True
    ):
        assert_bitwise(got, expected)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "gain"),
    [*((tokens, gain) for tokens in (FEW, SOME, MANY) for gain in (0.0, 1e15)), (SOME, 1e-12), (MANY, 1e6)],
)
@pytest.mark.parametrize("op", ["mhc_boundary", "mhc_head"])
def test_streams_of_any_size(op: str, tokens: int, gain: float) -> None:
    check(op, arguments(op, tokens, 144, gain=gain))


@interpreted
@pytest.mark.parametrize("scale", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_coefficients_at_their_limits(tokens: int, scale: float) -> None:
    """Logits of up to 200 and of -200: sigmoids of 0 and 1, a softmax of one element, sums near hc_eps."""
    args = list(arguments("mhc_boundary", tokens, 16, torch.float32))
    args[6] = torch.full((3,), scale)
    args[4] = (args[4] * 4).bfloat16()  # exact where it is split
    got, _ = launch("mhc_boundary", tuple(args))
    want = exact("mhc_boundary", tuple(args), got)[2:]
    # A logit of 200 is good to 200 x 2^-22 in float32.
    for actual, expected in zip(got[2:], want, strict=True):
        assert ((actual - expected).abs() <= 2e-4).all()
        assert actual.isfinite().all()


@interpreted
@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
@pytest.mark.parametrize("op", OPS)
def test_a_token_of_nan_keeps_to_itself(op: str, tokens: int) -> None:
    args = arguments(op, tokens, 144)
    want, _ = launch(op, args)
    args[0][1, 2, 5] = torch.nan
    got, _ = launch(op, args)
    others = torch.arange(tokens) != 1
    for actual, expected in zip(got, want, strict=True):
        assert_bitwise(actual[others], expected[others])
        assert actual[1].isnan().any()


@interpreted
@pytest.mark.parametrize("iterations", [1, 2, calls.ITERATIONS])
def test_iterations(iterations: int) -> None:
    check("mhc_pre", arguments("mhc_pre", FEW, 80, iterations=iterations))
    check("mhc_boundary", arguments("mhc_boundary", MANY, 80, iterations=iterations))


@contextmanager
def disorder(monkeypatch: pytest.MonkeyPatch, shuffle: Callable[[list[int]], None]) -> Iterator[None]:
    """Run the programs of each launch in the order that `shuffle` gives."""
    builder = triton_interpreter.interpreter_builder
    set_grid_idx, numbers = builder.set_grid_idx, list[int]()

    def elsewhere(x: int, y: int, z: int) -> None:
        if x == 0:
            numbers[:] = range(builder.grid_dim[0])
            shuffle(numbers)
        set_grid_idx(numbers[x], y, z)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", elsewhere)
        yield


@interpreted
@pytest.mark.parametrize(
    ("op", "tokens"),
    [*((op, FEW) for op in OPS), ("mhc_pre", SOME), ("mhc_boundary", TWO_TILES), ("mhc_boundary", MANY)],
)
def test_programs_may_run_in_any_order_and_one_by_one(op: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs a program to its end before the next: one that waited for a later one would hang."""
    args = arguments(op, tokens, 300)
    want, _ = launch(op, args)
    rng = random.Random(1)
    for shuffle in (list.reverse, rng.shuffle):
        with disorder(monkeypatch, shuffle):
            got, _ = launch(op, args)
        for actual, expected in zip(got, want, strict=True):
            assert_bitwise(actual, expected)


@interpreted
@pytest.mark.parametrize(("tokens", "groups"), [(0, 0), (1, 2), (SOME, 0), (SOME, 2), (MANY, 2)])
@pytest.mark.parametrize("op", OPS)
def test_a_token_of_a_step_has_the_sums_of_a_launch_of_it_alone(
    op: str, tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ctas_per_sm", lambda streams: groups)
    args = arguments(op, tokens, 300)
    rows = row_places(op, TORCH_OPS[op]._schema.arguments)
    if tokens > 1:
        args[0][1, 2, 5] = torch.nan
    step = invariant_launcher(op, STEP)
    rng = random.Random(tokens)
    with poisoned_empty(), checked(mutated=MUTATED) as launched, disorder(monkeypatch, rng.shuffle):
        got = results(step(*args))
    few = ["mhc_token_kernel"] if tokens else []
    assert launched == (few if tokens <= FEW else ["mhc_slices_kernel", "mhc_finish_kernel"])
    for token in range(tokens):
        alone, _ = launch(op, tuple(x[token : token + 1] if i in rows else x for i, x in enumerate(args)))
        for actual, expected in zip(got, alone, strict=True):
            assert_bitwise(actual[token : token + 1], expected)
    for spread in (padded, strided):
        with poisoned_empty(), checked(mutated=MUTATED):
            again = results(step(*(spread(x) if isinstance(x, Tensor) else x for x in args)))
        for actual, expected in zip(again, got, strict=True):
            assert_bitwise(actual, expected)


@interpreted
def test_counters_are_zero_again_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(FEW, dtype=torch.int32)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: counters)
    for _ in range(2):
        check("mhc_boundary", arguments("mhc_boundary", FEW, 300))
        assert not counters.any()


def test_other_numbers_of_streams_and_rows_beyond_registers_are_unsupported() -> None:
    assert kernels.why_unsupported(torch.empty(2, 4, kernels.MAX_DIM)) == ""
    assert kernels.why_unsupported(torch.empty(2, 3, 64)) == "3 streams, the kernels are written for 4"
    assert f"{kernels.MAX_DIM + 1} channels" in kernels.why_unsupported(torch.empty(2, 4, kernels.MAX_DIM + 1))
    assert kernels.why_unsupported(torch.empty(2, 4, 0))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_kernels_compile_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    monkeypatch.setattr(kernels, "MANY_TILE_TOKENS", MANY_TILE_TOKENS)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: torch.zeros(count, dtype=torch.int32))
    calls = [("mhc_boundary", 4096)]
    if target == "sm_90":
        calls += [("mhc_boundary", 7168), ("mhc_pre", 4096), ("mhc_head", 4096)]
    with compiled_for(target) as compiled:
        for op, dim in calls:
            for tokens in (1, SOME, MANY):
                launcher(op)(*arguments(op, tokens, dim))
    assert len(compiled) == (1 + 2 + 3) * len(calls)
    assert all(kernel.assembled for kernel in compiled)
    assert all(begins_early(kernel) == early for kernel in compiled)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_a_step_of_any_size_reduces_in_the_layout_of_one_launch(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, target)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: torch.zeros(count, dtype=torch.int32))
    for dim, channels, row in ((4096, 128, 4096), (7168, 256, 8192)):
        with compiled_for(target) as compiled:
            for tokens in (1, MANY):
                invariant_launcher("mhc_boundary", STEP)(*arguments("mhc_boundary", tokens, dim))
        one, slices, finish = compiled
        assert all(kernel.assembled for kernel in compiled)
        # Threads of a reduction by its layout, which ttgir names at the reduction and defines at the top.
        sums, rows = (reductions(one, f"x{size}xf32") for size in (channels, row))
        assert len(sums) == 2 and sums == reductions(slices, f"x{channels}xf32")
        assert rows and rows == reductions(finish, f"x{row}xf32")


def test_no_kernel_waits_in_a_loop_for_another_program() -> None:
    """Only an arrival is atomic; what it returns decides who finishes, and nobody polls a counter."""
    for kernel in (
        kernels.mhc_token_kernel,
        kernels.mhc_slices_kernel,
        kernels.mhc_tokens_kernel,
        kernels.mhc_many_tokens_kernel,
        kernels.mhc_finish_kernel,
    ):
        assert "while" not in kernel.src
    assert "while" not in semaphores.arrive.src
