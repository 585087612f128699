"""Paged reads and writes: addresses, what stays untouched, and the absence of host synchronisation."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.reference import paging
from dsv4_compile.testing import refuse_synchronization

FORMATS = tuple(layout.PAGE_LAYOUTS)


def dirty_cache(fmt: str, pages: int, block_size: int) -> torch.Tensor:
    """A byte cache whose backing memory, page padding included, is random."""
    stride = layout.PAGE_LAYOUTS[fmt].page_stride(block_size)
    backing = torch.randint(0, 256, (pages * stride,), dtype=torch.uint8)
    return backing.as_strided(layout.cache_shape(fmt, pages, block_size, 128), (stride, 1))


def backing(cache: torch.Tensor, pages: int) -> torch.Tensor:
    return cache.as_strided((pages * cache.stride(0),), (1,))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_size", [2, 64])
def test_write_bytes_touches_the_addressed_bytes_only(fmt: str, block_size: int) -> None:
    page = layout.PAGE_LAYOUTS[fmt]
    cache = dirty_cache(fmt, 3, block_size)
    expected = backing(cache, 3).clone()
    slots = torch.tensor([3 * block_size - 1, -1, 0, 3 * block_size, block_size, -7])
    data = torch.randint(0, 256, (6, page.data), dtype=torch.uint8)
    scale = torch.randint(0, 256, (6, page.scale), dtype=torch.uint8)
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < 3 * block_size:
            base, offset = slot // block_size * cache.stride(0), slot % block_size
            start = base + offset * page.data
            expected[start : start + page.data] = data[row]
            start = base + block_size * page.data + offset * page.scale
            expected[start : start + page.scale] = scale[row]
    paging.write_bytes(cache, fmt, block_size, slots, data, scale)
    assert torch.equal(backing(cache, 3), expected)
    read_data, read_scale = paging.read_bytes(cache, fmt, block_size, slots)
    live = torch.tensor([True, False, True, False, True, False])
    assert torch.equal(read_data, torch.where(live[:, None], data, 0))
    assert torch.equal(read_scale, torch.where(live[:, None], scale, 0))


@pytest.mark.parametrize("fmt", FORMATS)
def test_write_bytes_accepts_the_accounting_view(fmt: str) -> None:
    page = layout.PAGE_LAYOUTS[fmt]
    cache = dirty_cache(fmt, 2, 8)
    view = cache.as_strided((2, 8, page.data + page.scale), (cache.stride(0), page.data + page.scale, 1))
    data = torch.randint(0, 256, (1, page.data), dtype=torch.uint8)
    scale = torch.randint(0, 256, (1, page.scale), dtype=torch.uint8)
    paging.write_bytes(view, fmt, 8, torch.tensor([13]), data, scale)
    assert torch.equal(cache[1, 5 * page.data : 6 * page.data], data[0])
    assert torch.equal(paging.read_bytes(cache, fmt, 8, torch.tensor([13]))[1], scale)


@pytest.mark.parametrize("keep", [(True, False, True), (False, True, False), (False, False, False), (True, True, True)])
def test_write_rows_drops_rows_that_are_not_kept(keep: tuple[bool, ...]) -> None:
    target = torch.randn(4, 5)
    rows = torch.full((3, 5), torch.nan)
    expected = target.clone()
    for row, kept in enumerate(keep):
        if kept:
            rows[row] = expected[row + 1] = torch.randn(5)
    index = torch.where(torch.tensor(keep), torch.arange(1, 4), 0)
    paging.write_rows(target, (index,), rows, torch.tensor(keep))
    assert torch.equal(target, expected)


def test_reads_of_an_empty_pool_give_zeros_and_writes_nothing() -> None:
    cache = torch.empty(0, 4, 3)
    slots = torch.tensor([[0, -1]])
    assert torch.equal(paging.read_rows(cache, 4, slots), torch.zeros(1, 2, 3))
    paging.write_row_slots(cache, 4, slots[0], torch.ones(2, 3))


def test_lookup_slots_refuses_every_index_out_of_range() -> None:
    table = torch.tensor([[5, 2, -1]], dtype=torch.int32)
    requests = torch.tensor([0, 0, 0, 0, 0, 1, -1])
    logical = torch.tensor([63, 64, 130, 192, -1, 0, 0])
    expected = [5 * 64 + 63, 2 * 64, -1, -1, -1, -1, -1]
    assert paging.lookup_slots(table, requests, logical, 64).tolist() == expected


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_access_synchronises(fmt: str) -> None:
    page = layout.PAGE_LAYOUTS[fmt]
    cache, slots = dirty_cache(fmt, 2, 4), torch.tensor([0, -1, 5])
    data, scale = torch.zeros(3, page.data, dtype=torch.uint8), torch.zeros(3, page.scale, dtype=torch.uint8)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with refuse_synchronization():
        paging.write_bytes(cache, fmt, 4, slots, data, scale)
        paging.read_bytes(cache, fmt, 4, slots)
        paging.write_row_slots(torch.zeros(2, 4, 3), 4, slots, torch.zeros(3, 3))
        paging.lookup_slots(table, slots, slots, 4)
