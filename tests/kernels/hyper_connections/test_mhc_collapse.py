"""The kernel of `mhc_collapse` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.hyper_connections import mhc_collapse as kernels
from dsv4_compile.ops.common.kernels import refusal
from dsv4_compile.reference.hyper_connections.mhc_collapse import mhc_collapse as reference
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.kernels.hyper_connections.lagged import collapse, wrong_collapse
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FLOATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty(), checked(mutated=("p_out",)):
        out = kernels.mhc_collapse(*args)
    assert wrong_collapse(args, out) == ""
    return out


@interpreted
@pytest.mark.parametrize("number", range(3))
def test_samples(number: int) -> None:
    check(op_samples("mhc_collapse")[number])


@interpreted
@FLOATS
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (1, 300), (4, 80), (4, 1024), (7, 1), (7, 300)])
def test_any_number_of_streams_and_channels(count: int, dim: int, dtype: torch.dtype) -> None:
    check(collapse(4, dim, dtype, count=count))


@interpreted
@pytest.mark.parametrize("gain", [1e-8, 1e6, 1e15])
def test_streams_of_any_size_and_of_zeros(gain: float) -> None:
    out = check(collapse(4, 144, gain=gain))
    assert not out[2].any()


@interpreted
def test_the_eps_counts() -> None:
    check((*collapse(3)[:3], 0.5))


@interpreted
def test_one_stream_is_taken_before_the_first_layer() -> None:
    args = collapse(4)
    args[1][:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    args[0][:, 1:] = 3e38
    check(args)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_strided_arguments_in_memory_full_of_nan(spread: Callable[[Tensor], Tensor]) -> None:
    args = collapse(3, 144)
    want = check(args)
    assert_bitwise(check(tuple(spread(x) if isinstance(x, Tensor) else x for x in args)), want)


@interpreted
def test_infinite_and_nan_values_stay_in_their_token() -> None:
    args = collapse(5, 80)
    want = check(args)
    args[1][1, 2], args[0][3, 1, 7], args[1][4, 0] = torch.inf, torch.nan, torch.nan
    out = check(args)
    for token in (0, 2):
        assert_bitwise(out[token], want[token])
    assert out[3].isnan().all() and out[4].isnan().all()


def test_more_streams_or_channels_than_fit_are_unsupported() -> None:
    why = refusal("mhc_collapse")
    assert why is not None and why(*collapse(2, kernels.MAX_DIM)) == ""
    assert why(*collapse(2, 8, count=17)) == "17 streams, the kernel takes up to 16"
    assert f"{kernels.MAX_DIM + 1} channels" in why(*collapse(1, kernels.MAX_DIM + 1))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        kernels.mhc_collapse(*collapse(2, 5120))
    assert [kernel.assembled for kernel in compiled] == [True]
    assert all(begins_early(kernel) == early for kernel in compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [1, 7, 97, 600])
def test_the_reference_is_within_the_tolerance_of_the_kernel(dim: int, dtype: torch.dtype) -> None:
    args = collapse(100_000 // dim, dim, dtype)
    assert wrong_collapse(args, reference(*args)) == ""
