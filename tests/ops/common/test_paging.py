"""Paged addressing: bytes that a row write touches, and indices outside the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.reference.common import paging
from dsv4_compile.testing import assert_bitwise, hostile_values, poison_, refuse_synchronization
from tests.support import scalar


def rows_apart(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a poisoned buffer and its `[count, width]` view, with gaps between rows."""
    buffer = poison_(torch.empty(count + 1, width + 3, dtype=dtype))
    return buffer, buffer[:count, :width]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", ["none", "all", "some", "one"])
def test_row_writes_touch_kept_rows_and_nothing_else(dtype: torch.dtype, kept: str) -> None:
    keep = {
        "none": torch.zeros(6, dtype=torch.bool),
        "all": torch.ones(6, dtype=torch.bool),
        "some": torch.tensor([False, True, False, True, True, False]),
        "one": torch.arange(6) == 5,
    }[kept]
    buffer, target = rows_apart(9, 5, dtype)
    index = torch.where(keep, torch.tensor([8, 0, 3, 5, 1, 2]), 10**9)
    rows = torch.randint(0, 100, (6, 5)).to(dtype)
    expected = buffer.clone()
    for i, kept_row in enumerate(keep.tolist()):
        if kept_row:
            expected[index[i], :5] = rows[i]
    paging.write_rows(target, (index,), rows, keep)
    assert_bitwise(buffer, expected)


def test_row_writes_address_two_leading_dims_of_padded_pages() -> None:
    buffer = poison_(torch.empty(4, 40))
    target = buffer[:, :36].unflatten(1, (4, 9))
    block, offset = torch.tensor([3, 1, 0]), torch.tensor([3, 0, 2])
    rows, keep = torch.randn(3, 9), torch.tensor([True, True, False])
    expected = buffer.clone()
    expected[3, 27:36], expected[1, 0:9] = rows[0], rows[1]
    paging.write_rows(target, (block, offset), rows, keep)
    assert_bitwise(buffer, expected)


def test_nan_rows_that_are_dropped_stay_out() -> None:
    target, rows = torch.zeros(4, 3), torch.full((2, 3), torch.nan)
    rows[1] = 1.0
    paging.write_rows(target, (torch.tensor([0, 2]),), rows, torch.tensor([False, True]))
    assert target.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]


def test_nothing_to_write_and_nowhere_to_write_are_no_ops() -> None:
    target = torch.ones(3, 2)
    paging.write_rows(target, (torch.empty(0, dtype=torch.int64),), torch.empty(0, 2), torch.empty(0, dtype=torch.bool))
    assert target.tolist() == [[1.0] * 2] * 3
    paging.write_rows(torch.empty(0, 2), (torch.tensor([0]),), torch.ones(1, 2), torch.tensor([False]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_the_cache_read_zeros_and_write_nothing(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 4, 5)
    before = cache.clone()
    slots = torch.tensor(hostile_values(12), dtype=dtype)
    assert not paging.valid_slots(slots, 3, 4).any()
    with refuse_synchronization():
        paging.write_row_slots(cache, 4, slots, torch.full((len(slots), 5), torch.nan))
        got = paging.read_rows(cache, 4, slots)
    assert_bitwise(cache, before)
    assert_bitwise(got, torch.zeros(len(slots), 5))


def test_invalid_slots_do_not_read_the_nan_of_slot_zero() -> None:
    cache = torch.full((2, 2, 3), torch.nan)
    cache[1, 1] = 7.0
    got = paging.read_rows(cache, 2, torch.tensor([[-1, 3], [4, -1]]))
    assert got.tolist() == [[[0.0] * 3, [7.0] * 3], [[0.0] * 3, [0.0] * 3]]


def test_reads_of_a_cache_without_pages_are_zeros() -> None:
    assert not paging.read_rows(torch.empty(0, 4, 5), 4, torch.tensor([0, -1])).any()
    data, scale = paging.read_bytes(torch.empty(0, 264, dtype=torch.uint8), "indexer_fp8", 2, torch.tensor([0, 1]))
    assert (data.shape, scale.shape) == ((2, 128), (2, 4))
    assert not data.any()
    assert not scale.any()


@pytest.mark.parametrize("fmt", sorted(layout.PAGE_LAYOUTS))
@pytest.mark.parametrize("view", ["pages", "accounting view"])
def test_bytes_are_written_at_their_addresses_and_read_back(fmt: str, view: str) -> None:
    page, block_size, blocks = layout.PAGE_LAYOUTS[fmt], 4, 3
    stride = page.page_stride(block_size)
    storage = torch.randint(0, 256, (blocks * stride,), dtype=torch.uint8)
    cache = storage.as_strided((blocks, page.page_bytes(block_size)), (stride, 1))
    if view == "accounting view":
        cache = cache.unflatten(1, (block_size, page.data + page.scale))
    slots = torch.tensor([11, -1, 0, 12, 6])
    data = torch.randint(0, 256, (5, page.data), dtype=torch.uint8)
    scale = torch.randint(0, 256, (5, page.scale), dtype=torch.uint8)
    expected = bytearray(storage.tolist())
    for row in (0, 2, 4):
        values, scales = bytes(data[row].tolist()), bytes(scale[row].tolist())
        scalar.store(expected, fmt, stride, block_size, int(slots[row]), values, scales)
    with refuse_synchronization():
        paging.write_bytes(cache, fmt, block_size, slots, data, scale)
        got = paging.read_bytes(cache, fmt, block_size, slots)
    assert storage.tolist() == list(expected)
    live = torch.tensor([True, False, True, False, True])[:, None]
    assert_bitwise(got[0], torch.where(live, data, 0))
    assert_bitwise(got[1], torch.where(live, scale, 0))


@pytest.mark.parametrize(
    ("block_size", "table", "logical", "slot"),
    [(64, [5, 2], 0, 320), (64, [5, 2], 63, 383), (64, [5, 2], 64, 128), (64, [3, 8, 1, 4], 200, 264)],
)
def test_block_tables_give_the_published_slots(block_size: int, table: list[int], logical: int, slot: int) -> None:
    got = paging.lookup_slots(
        torch.tensor([table], dtype=torch.int32), torch.tensor([0]), torch.tensor([logical]), block_size
    )
    assert got.dtype is torch.int64
    assert got.tolist() == [slot]


def test_block_table_lookups_out_of_range_give_padding() -> None:
    table = torch.tensor([[4, -1], [0, 9]], dtype=torch.int32)
    request = torch.tensor([-1, 2, 0, 0, 0, 1, 0])
    logical = torch.tensor([0, 0, -1, 4, 2, 3, 2**31 - 1])
    assert paging.lookup_slots(table, request, logical, 2).tolist() == [-1, -1, -1, -1, -1, 19, -1]
    assert paging.lookup_slots(table[:0], request, logical, 2).tolist() == [-1] * 7
    assert paging.lookup_slots(table[:, :0], request, logical, 2).tolist() == [-1] * 7


def test_block_table_rows_may_be_apart() -> None:
    wide = torch.full((3, 8), 77, dtype=torch.int32)
    wide[:, :2] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    got = paging.lookup_slots(wide[:, :2], torch.arange(3)[:, None], torch.arange(4), 2)
    assert got.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]


def test_slots_past_two_to_the_31_do_not_wrap() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    got = paging.lookup_slots(table, torch.tensor([0]), torch.tensor([255], dtype=torch.int32), 256)
    assert got.tolist() == [(2**31 - 1) * 256 + 255]
