"""The gathering kernel, bit for bit against the reference, every access checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import dequantize_and_gather_k_cache as kernel
from dsv4_compile.reference.preprocess.dequantize_and_gather_k_cache import dequantize_and_gather_k_cache as reference
from dsv4_compile.testing import assert_bitwise, padded, poison_, random_cache, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.handed_over import handed_over
from tests.ops.preprocess.test_dequantize_and_gather_k_cache import BLOCK, TABLE, full_cache, ints
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.KV_FORMATS)


def check(out: Tensor, *args: Any) -> Tensor:
    """Run both over equal memory and return what the kernel wrote."""
    want = out.clone()
    with checked(("tensors[0]",)):
        kernel.dequantize_and_gather_k_cache(out, *args)
    reference(want, *args)
    assert_bitwise(out, want)
    return out


@interpreted
def test_samples() -> None:
    for args in op_samples("dequantize_and_gather_k_cache"):
        assert kernel.why_unsupported_dequantize_and_gather_k_cache(*args) == ""
        check(*args)


@interpreted
@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("seq_lens", "gather_lens", "rows", "offset"),
    [
        pytest.param([16, 7, 4], [16, 7, 4], 20, 0, id="whole"),
        pytest.param([16, 15, 9], [5, 6, 9], 9, 2, id="tails, missing blocks, an offset"),
        pytest.param([16, 8, 3], [16, 8, 3], 6, 1, id="out too short"),
        pytest.param([2, 0, -(2**31)], [5, 3, 2], 8, 0, id="before the first entry"),
        pytest.param([0, 20, 2**31 - 1], [0, 20, 5], 21, 4, id="behind the table"),
        pytest.param([16, 7, 4], [3, 3, 3], 4, 4, id="offset at the end"),
    ],
)
def test_entries_land_in_their_rows(
    fmt: str, dtype: torch.dtype, seq_lens: list[int], gather_lens: list[int], rows: int, offset: int
) -> None:
    cache = full_cache(fmt)
    out = poison_(torch.empty(3, rows, 512, dtype=dtype))
    check(out, cache.cache, ints(seq_lens), ints(gather_lens), TABLE, BLOCK, offset, fmt, cache.kv_scale)


@interpreted
@FORMATS
def test_all_entries_any_strides_and_few_programs(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 1)
    cache, lens = full_cache(fmt), ints([16, 7, 4])
    out = poison_(torch.empty(3, 20, 512, dtype=torch.float16))
    want = check(out.clone(), cache.cache, lens, None, TABLE, BLOCK, 1, fmt, cache.kv_scale)
    keys = strided(cache.cache) if fmt != "fp8_ds_mla" else cache.cache
    got = check(strided(out), keys, strided(lens), strided(lens), padded(TABLE), BLOCK, 1, fmt, cache.kv_scale)
    assert_bitwise(got, want)


@interpreted
def test_every_code_with_every_scale_is_dequantised_exactly_and_nan_stays_nan() -> None:
    cache = layout.allocate_cache("fp8_ds_mla", 1, 256)
    data, scale = cache[0, : 256 * 576].view(256, 576), cache[0, 256 * 576 :].view(256, 8)
    data[:, :448] = torch.arange(448).to(torch.uint8)
    data[:, 448:] = torch.randn(256, 64).bfloat16().view(torch.uint8)
    scale[:, :7] = torch.arange(256)[:, None].to(torch.uint8)
    out = torch.zeros(1, 256, 512, dtype=torch.bfloat16)
    check(out, cache, ints([256]), None, torch.zeros(1, 1, dtype=torch.int32), 256, 0)
    assert out.isnan().any() and out[:, :255, 448:].isfinite().all()


@interpreted
def test_nan_in_unused_rows_stays_out() -> None:
    cache = random_cache("fp8_ds_mla", 8, BLOCK, live=0)
    out = torch.zeros(3, 5, 512, dtype=torch.bfloat16)
    check(out, cache.cache, ints([0, 0, 0]), None, TABLE, BLOCK, 0)
    assert not out.any()


@interpreted
def test_nothing_to_gather() -> None:
    cache, lens = full_cache("plain"), ints([16, 7, 4])
    out = torch.zeros(3, 4, 512)
    for args in (
        (out[:0], cache.cache, lens[:0], None, TABLE[:0], BLOCK, 0, "plain"),
        (out, cache.cache[:0], lens, None, TABLE, BLOCK, 0, "plain"),
        (out, cache.cache, lens, None, TABLE[:, :0], BLOCK, 0, "plain"),
        (out, cache.cache, lens, None, TABLE, BLOCK, 4, "plain"),
    ):
        check(*args)


def test_pages_that_start_at_odd_bytes_are_refused() -> None:
    pages = torch.zeros(2, 4 * 584 + 1, dtype=torch.uint8)
    for odd in (pages[:, 1:], handed_over(pages[:, 1:], 1)):
        args = torch.zeros(3, 4, 512), odd, ints([1, 2, 3]), None, TABLE, BLOCK, 0
        assert "not aligned" in kernel.why_unsupported_dequantize_and_gather_k_cache(*args)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    cache, lens = layout.allocate_cache("fp8_ds_mla", 8, 64), ints([16, 7, 4])
    with compiled_for(target) as compiled:
        kernel.dequantize_and_gather_k_cache(torch.zeros(3, 20, 512).bfloat16(), cache, lens, lens, TABLE, 64, 1)
    assert compiled[0].assembled
