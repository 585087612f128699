"""Lists as padded rows, bit by bit and with every access checked, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention import sparse_mla_decode as kernel
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.attention.sparse_mla_decode import dense_rows as reference
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OUTPUTS = ("p_window_rows", "p_window_lens", "p_extra_rows", "p_extra_lens")
OP = "sparse_mla_decode_ragged"
List = tuple[Tensor, Tensor, int]


def made(tokens: int, width: int, spare: int = 3, dtype: torch.dtype = torch.int32) -> List:
    """Return a list of rows of up to `width` entries, some of them invalid slots, some rows longer than the bound."""
    lens = torch.randint(width + 3, (tokens,))
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(dtype)
    return hostile_indices((int(ends[-1]) + spare,), 1000, fraction=0.3).to(dtype), ends, width


def compare(tokens: int, first: List, second: List | None = None) -> None:
    with checked(mutated=OUTPUTS):
        ours = kernel.dense_rows(tokens, first, second)
    lists = [first] if second is None else [first, second]
    want = [tensor for indices, indptr, width in lists for tensor in reference(indices, indptr, tokens, width)]
    assert len(ours) == len(want)
    for number, (got, expected) in enumerate(zip(ours, want, strict=True)):
        if number % 2 == 0:  # invalid slots may be any negative number
            expected = torch.where(expected < 0, -1, expected)
        assert_bitwise(got, expected.to(torch.int32), strides=True)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("tokens", "width"), [(5, 7), (1, 1), (3, 256), (2, 257), (2, 600), (0, 9)])
def test_every_size(tokens: int, width: int) -> None:
    compare(tokens, made(tokens, width))
    compare(tokens, made(tokens, 20), made(tokens, width))
    compare(tokens, made(tokens, width), made(tokens, 300))


def test_a_long_list_does_not_leave_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(kernel, "dense_rows_kernel", Recorder())
    width = 256 * 65536
    kernel.dense_rows(3, (torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), width), None)
    assert grids == [(3 * 65536,)]


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_strides_and_both_integer_widths(spread: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    indices, indptr, width = made(5, 40, dtype=dtype)
    compare(5, (spread(indices), spread(indptr), width), made(5, 9))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("ends", [[3, 1, 1], [-5, -2, -2], [10**6, 2 * 10**6, 2**31 - 1], [-(2**31), 2**31 - 1, 0]])
def test_hostile_ends_read_nothing_outside_the_list(ends: list[int]) -> None:
    compare(2, (torch.arange(4, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), 5))
    compare(2, (torch.zeros(0, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), 5))


@interpreted
def test_a_slot_that_int32_cannot_hold_is_invalid() -> None:
    indices = torch.tensor([3, 2**31, 2**40 + 1, 2**31 - 1])
    rows, _ = kernel.dense_rows(1, (indices, torch.tensor([0, 4]), 4), None)
    assert rows.tolist() == [[3, -1, -1, 2**31 - 1]]


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples(OP))))
def test_attention_over_lists_has_the_bits_of_attention_over_rows(number: int) -> None:
    args = op_samples(OP)[number]
    q, cache, indices, indptr, block, fmt, scale, sink, extra, more, more_ends, extra_block, kv_scale = args[:13]
    why_unsupported = refusal(OP)
    assert why_unsupported is not None and why_unsupported(*args) == ""
    most, extra_most = (*args[13:], 0, 0)[:2]
    rows = reference(indices, indptr, q.shape[0], most)
    extra_rows = (None, None) if more is None else reference(more, more_ends, q.shape[0], extra_most)
    attend = (block, fmt, scale, sink, extra, *extra_rows, extra_block, kv_scale)
    want = launcher("sparse_mla_decode")(q, cache, *rows, *attend)
    for got, expected in zip(launcher(OP)(*args), want, strict=True):
        assert_bitwise(got, expected, strides=True)


def test_rows_without_a_bound_are_unsupported_where_they_would_fill_memory() -> None:
    why_unsupported = refusal(OP)
    assert why_unsupported is not None
    args: list[Any] = list(op_samples(OP)[0])
    args[2] = args[2][:1].expand(-(-kernel.MAX_ROWS_NUMEL // args[0].shape[0]))
    assert why_unsupported(*args) == ""
    args[13] = 0
    assert "give max_entries" in why_unsupported(*args)
    args[2] = args[2][1:]
    assert why_unsupported(*args) == ""


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        kernel.dense_rows(3, made(3, 7), made(3, 9))
    assert len(compiled) == 1
    assert compiled[0].assembled
