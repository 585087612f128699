"""The kernel that gathers indexer keys, bit for bit against the reference, every access checked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import cp_gather_indexer_k as kernel
from dsv4_compile.reference.indexer.cp_gather_indexer_k import cp_gather_indexer_k as reference
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.ops.indexer.test_cp_gather_indexer_k import BLOCK, PAGES, arguments
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)


def check(cache: Tensor, table: Tensor, bounds: Tensor, k: Tensor, k_scale: Tensor, *rest: Any) -> None:
    want = k.clone(), k_scale.clone()
    with checked(("outputs[0]", "outputs[1]")):
        kernel.cp_gather_indexer_k(cache, table, bounds, k, k_scale, *rest)
    reference(cache, table, bounds, *want, *rest)
    assert_bitwise(k.contiguous(), want[0].contiguous())
    assert_bitwise(k_scale.contiguous(), want[1].contiguous())


@interpreted
def test_samples() -> None:
    for args in op_samples("cp_gather_indexer_k"):
        check(*args)


@interpreted
@FORMATS
@pytest.mark.parametrize(
    ("lengths", "rows"), [([7], 9), ([3, 0, 9, 1], 13), ([0, 0, 5], 3), ([12, 14, 0], 40), ([1] * 40, 41), ([], 2)]
)
def test_any_requests(fmt: str, lengths: list[int], rows: int) -> None:
    check(*arguments(fmt, lengths, rows), BLOCK, fmt)


@interpreted
@FORMATS
def test_hostile_blocks_fewer_table_rows_and_any_strides(fmt: str) -> None:
    cache, table, bounds, k, k_scale = arguments(fmt, [12, 9, 11], 35)
    table = hostile_indices(tuple(table.shape), PAGES, fraction=0.4)
    check(cache, table, bounds, k, k_scale, BLOCK, fmt)
    check(cache, table[:2], bounds + 2, k, k_scale, BLOCK, fmt)
    keys = strided(cache) if fmt == "plain" else padded(cache)
    scale = strided(k_scale) if fmt != "plain" else k_scale
    check(keys, strided(table), strided(bounds.long()), strided(k), scale, BLOCK, fmt)


@interpreted
@FORMATS
def test_nothing_to_gather_zeroes_everything(fmt: str) -> None:
    cache, table, bounds, k, k_scale = arguments(fmt, [3, 2], 6)
    check(cache[:0], table, bounds, k, k_scale, BLOCK, fmt)
    check(cache, table[:, :0], bounds, k, k_scale, BLOCK, fmt)
    check(cache, table, bounds, k[:0], k_scale[:0], BLOCK, fmt)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    with compiled_for(target) as compiled:
        for fmt in ("indexer_fp8", "plain"):
            kernel.cp_gather_indexer_k(*arguments(fmt, [5, 9]), BLOCK, fmt)
    assert len(compiled) == 2
    assert all(binary.assembled for binary in compiled)
