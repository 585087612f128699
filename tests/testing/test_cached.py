"""`assert_cached`: what passes is a tie, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import assert_cached
from dsv4_compile.testing.cached import FEW_TIES

FORMATS = ["fp8_ds_mla", "fp8", "indexer_fp8", "indexer_mxfp4"]
ROWS, BLOCK = 100, 64


def stored(fmt: str) -> Tensor:
    """A cache of random rows."""
    torch.manual_seed(0)
    dim = layout.HEAD_DIM if fmt in layout.KV_FORMATS else layout.INDEXER_HEAD_DIM
    cache = layout.allocate_cache(fmt, 2, BLOCK, dim)
    store = kv_format.store_kv if fmt in layout.KV_FORMATS else kv_format.store_indexer
    store(cache, fmt, BLOCK, torch.arange(ROWS), torch.randn(ROWS, dim))
    return cache


def with_first_bytes(cache: Tensor, change: Tensor) -> Tensor:
    """The first bytes of the first row, which hold values in every format, plus `change`."""
    changed = cache.clone()
    changed.view(torch.uint8).view(-1)[: len(change)] += change.to(torch.uint8)
    return changed


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_few_neighbours_pass_and_are_counted(fmt: str) -> None:
    cache = stored(fmt)
    assert assert_cached(cache.clone(), cache, fmt, BLOCK) == 0
    assert assert_cached(with_first_bytes(cache, torch.ones(2)), cache, fmt, BLOCK) == 2


@pytest.mark.parametrize("fmt", FORMATS)
def test_two_steps_are_none_and_neither_are_many_neighbours(fmt: str) -> None:
    cache = stored(fmt)
    with pytest.raises(AssertionError, match="2 steps apart"):
        assert_cached(with_first_bytes(cache, torch.tensor([2])), cache, fmt, BLOCK)
    with pytest.raises(AssertionError, match=f"{FEW_TIES + 1} values of {ROWS} rows"):
        assert_cached(with_first_bytes(cache, torch.ones(FEW_TIES + 1)), cache, fmt, BLOCK)


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "indexer_fp8", "indexer_mxfp4"])
def test_a_scale_is_exact(fmt: str) -> None:
    cache = stored(fmt)
    changed = cache.clone()
    changed[0, BLOCK * layout.PAGE_LAYOUTS[fmt].data] += 1
    with pytest.raises(AssertionError, match="1 rows have other scales"):
        assert_cached(changed, cache, fmt, BLOCK)


def test_a_bfloat16_is_one_value_of_two_bytes() -> None:
    cache = stored("fp8_ds_mla")
    changed = cache.clone()
    low = changed[0, layout.NOPE_DIM : layout.NOPE_DIM + 2].view(torch.int16)
    low += 1
    assert assert_cached(changed, cache, "fp8_ds_mla", BLOCK) == 1


def test_what_a_rotation_left_of_a_pair_may_be_off_by_what_float32_leaves_of_the_pair() -> None:
    cache = stored("fp8_ds_mla")
    pair = cache[0, layout.NOPE_DIM : layout.NOPE_DIM + 4].view(torch.bfloat16)
    pair.copy_(torch.tensor([1.0, 2.0**-16]))
    changed = cache.clone()
    left = changed[0, layout.NOPE_DIM + 2 : layout.NOPE_DIM + 4].view(torch.bfloat16)
    left *= 1.5
    assert assert_cached(changed, cache, "fp8_ds_mla", BLOCK) == 1
    left *= 2
    with pytest.raises(AssertionError, match="steps apart"):
        assert_cached(changed, cache, "fp8_ds_mla", BLOCK)


def test_entries_of_many_rows_have_more_ties() -> None:
    cache = stored("fp8")
    changed = with_first_bytes(cache, torch.ones(FEW_TIES + 1))
    with pytest.raises(AssertionError, match="values of"):
        assert_cached(changed, cache, "fp8", BLOCK, pooled=4)
    assert assert_cached(changed, cache, "fp8", BLOCK, pooled=10**8) == FEW_TIES + 1


def test_zeros_of_both_signs_are_one_value() -> None:
    cache = torch.zeros(1, 2, 8, dtype=torch.uint8)
    cache[0, 0, 0] = 1
    changed = cache.clone()
    changed[0, 0, 1], changed[0, 0, 0] = 0x80, 0x80
    assert assert_cached(changed, cache, "fp8", 2) == 1


def test_behind_a_transform_small_values_may_shift_by_more() -> None:
    cache = torch.zeros(1, layout.INDEXER_FP8.page_bytes(1), dtype=torch.uint8)
    kv_format.store_indexer(cache, "indexer_fp8", 1, torch.tensor([0]), torch.randn(1, layout.INDEXER_HEAD_DIM))
    cache[0, 3] = 0x10
    changed = cache.clone()
    changed[0, 3] += 3
    assert assert_cached(changed, cache, "indexer_fp8", 1, transformed=True) == 1
    with pytest.raises(AssertionError, match="3 steps apart"):
        assert_cached(changed, cache, "indexer_fp8", 1)
