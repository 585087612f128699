"""The kernel of `engram_gate` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.engram import engram_gate as kernels
from dsv4_compile.ops.common.kernels import refusal
from dsv4_compile.reference.engram.engram_gate import engram_gate as reference
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.engram.gates import arguments, wrong
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty(), checked(mutated=("p_out",)):
        out = kernels.engram_gate(*args)
    assert wrong(args, out) == ""
    return out


@interpreted
@pytest.mark.parametrize("number", range(3))
def test_samples(number: int) -> None:
    check(op_samples("engram_gate")[number])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [1, 80, 300, 1024])
@pytest.mark.parametrize("count", [1, 4, 3])
def test_any_number_of_streams_and_channels(count: int, dim: int, dtype: torch.dtype) -> None:
    check(arguments(3, dim, dtype, count=count))


@interpreted
@pytest.mark.parametrize("gain", [0.0, 1e-8, 1e4])
@pytest.mark.parametrize("eps", [1e-20, 0.5])
def test_streams_of_any_size_at_both_eps(gain: float, eps: float) -> None:
    check((*arguments(4, 144, torch.float32, gain=gain)[:5], eps))


@interpreted
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_small_dots_keep_their_sign_and_a_dot_of_zero_is_positive(sign: float) -> None:
    """The root of a dot below 1e-6 is 1e-3: half of the value, and a quarter of 1e-3 more or less."""
    streams, keys, value = torch.zeros(2, 1, 8), torch.zeros(2, 8), torch.full((2, 8), 4096.0)
    keys[:, 0], keys[:, 1], streams[0, 0, 0], streams[:, 0, 1:] = sign, 1.0, 1e-9, 0.0
    streams[:, 0, 2] = 1.0
    ones = torch.ones(1, 8)
    args = streams, torch.cat((keys, value), 1), ones, ones, torch.zeros(2, dtype=torch.bool), 1e-20
    out = check(args)
    assert ((out[0, 0, 3:] > 2048.5) if sign > 0 else (out[0, 0, 3:] < 2047.5)).all()
    assert (out[1, 0, 3:] > 2048.5).all()
    args[0][1] = -0.0
    assert (check(args)[1, 0, 3:] > 2048.5).all()


@interpreted
def test_image_tokens_and_tokens_of_nan() -> None:
    args = arguments(5, 80)
    want = check(args)
    args[4][:] = torch.tensor([True, False, True, False, False])
    args[0][2, 1, 3], args[1][3, 7], args[0][4, 0, 0] = torch.nan, torch.nan, torch.nan
    out = check(args)
    assert_bitwise(out[0], args[0][0])
    assert_bitwise(out[1], want[1])
    assert int(out[2].isnan().sum()) == 1
    assert out[3, 0].isnan().all() and out[4, 0].isnan().all()
    assert_bitwise(out[4, 1:], want[4, 1:])


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_strided_arguments_in_memory_full_of_nan(spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments(3, 144)
    want = check(args)
    assert_bitwise(check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args)), want)


def test_more_channels_than_fit_are_unsupported() -> None:
    why = refusal("engram_gate")
    assert why is not None and why(*arguments(1, kernels.MAX_DIM)) == ""
    assert f"{kernels.MAX_DIM + 1} channels" in why(*arguments(1, kernels.MAX_DIM + 1))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        kernels.engram_gate(*arguments(2, 5120))
    assert [kernel.assembled for kernel in compiled] == [True]
    assert all(begins_early(kernel) == early for kernel in compiled)


@pytest.mark.parametrize(("tokens", "dim"), [(20_000, 1), (2000, 97), (100, 5120)])
def test_the_reference_is_within_the_tolerance_of_the_kernel(tokens: int, dim: int) -> None:
    args = arguments(tokens, dim, torch.float32)
    assert wrong(args, reference(*args)) == ""
