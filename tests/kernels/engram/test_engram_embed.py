"""The kernel of `engram_embed` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.engram import engram_embed as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import refusal
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
E4M3 = torch.float8_e4m3fn


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty(), checked(mutated=("p_out",)):
        out = kernels.engram_embed(*args)
    want = REFERENCES["engram_embed"](*args)
    # The bits of a NaN are the CPU's.
    assert_bitwise(torch.where(out.isnan(), torch.nan, out), torch.where(want.isnan(), torch.nan, want))
    assert out.is_contiguous()
    return out


def quantised(entries: int, channels: int, count: int, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a third of them outside the table, and a table of any bytes with any scales."""
    rows = hostile_indices((tokens, count), entries, fraction=0.3)
    data = torch.randint(256, (entries, channels), dtype=torch.uint8).view(E4M3)
    return rows, data, torch.randint(256, (entries, channels // 32), dtype=torch.uint8)


@interpreted
@pytest.mark.parametrize("number", range(3))
def test_samples(number: int) -> None:
    check(op_samples("engram_embed")[number])


@interpreted
@pytest.mark.parametrize(("channels", "count"), [(32, 1), (256, 24), (96, 5), (8192, 3)])
def test_any_byte_with_any_scale_in_rows_of_any_length(channels: int, count: int) -> None:
    """Denormal scales and values, and the NaN of both, among them."""
    rows, data, scale = quantised(9, channels, count)
    check((rows, data, scale))
    check((rows.long(), data, scale.view(torch.float8_e8m0fnu)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [1, 37, 256])
def test_floating_tables(channels: int, dtype: torch.dtype) -> None:
    check((hostile_indices((4, 3), 7, fraction=0.3), torch.randn(7, channels).to(dtype)))


@interpreted
def test_rows_that_nobody_names_may_be_nan() -> None:
    table = torch.full((6, 64), torch.nan)
    table[[0, 4]] = torch.randn(2, 64)
    rows = torch.tensor([[0, 4, -1, 6, 2**31 - 1], [4, 4, -(2**31), 0, 0]])
    assert check((rows, table)).isfinite().all()


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Callable[[Tensor], Tensor]) -> None:
    rows, data, scale = quantised(9, 96, 5)
    args = spread(rows), spread(data.view(torch.uint8)).view(E4M3), spread(scale)
    got, want = (check(x).nan_to_num(7.0) for x in (args, (rows, data, scale)))
    assert_bitwise(got, want)


@interpreted
def test_an_empty_table_gives_zeros_and_no_row_nothing() -> None:
    rows, data, scale = quantised(3, 32, 2)
    assert not check((rows, data[:0], scale[:0])).any()
    assert check((rows[:, :0], data, scale)).shape == (5, 0)


def test_more_channels_than_fit_are_unsupported() -> None:
    why = refusal("engram_embed")
    assert why is not None and why(*quantised(1, kernels.MAX_CHANNELS, 1)) == ""
    assert f"{kernels.MAX_CHANNELS + 32} channels" in why(*quantised(1, kernels.MAX_CHANNELS + 32, 1))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        kernels.engram_embed(*quantised(9, 256, 24))
    assert [kernel.assembled for kernel in compiled] == [True]
    assert all(begins_early(kernel) == early for kernel in compiled)
