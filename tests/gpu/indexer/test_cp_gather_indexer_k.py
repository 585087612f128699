"""The kernel that gathers indexer keys on a GPU, equal to the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import cp_gather_indexer_k as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import hostile_indices, random_cache
from tests.gpu.far import behind_2_31_bytes, moved

REFERENCE = REFERENCES["cp_gather_indexer_k"]
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)


def arguments(fmt: str, requests: int, rows: int, block: int = 64, pages: int = 200) -> tuple[Any, ...]:
    """Requests of random lengths, some longer than their tables; pages that do not exist; poisoned outputs."""
    cache = random_cache(fmt, pages, block, live=pages * block, head_dim=128, device="cuda").cache
    table = hostile_indices((requests, 40), pages, fraction=0.1, device="cuda")
    lens = torch.randint(0, max(2 * rows // max(requests, 1), 1) + 1, (requests,), device="cuda")
    bounds = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    page = layout.PAGE_LAYOUTS.get(fmt)
    k = torch.full((rows, page.data if page else 128), 77, device="cuda").to(cache.dtype)
    return cache, table, bounds, k, k.new_full((rows, page.scale if page else 0), 77).byte(), block, fmt


def check(args: tuple[Any, ...]) -> None:
    want: list[Any] = [x.clone() if i in (3, 4) else x for i, x in enumerate(args)]
    kernel.cp_gather_indexer_k(*args)
    REFERENCE(*want)
    assert isinstance(args[3], Tensor)
    assert torch.equal(args[3], want[3]) and torch.equal(args[4], want[4])


@FORMATS
@pytest.mark.parametrize("block", [64, 24, 1])
@pytest.mark.parametrize(("requests", "rows"), [(0, 5), (1, 1), (1, 4000), (7, 20_000), (3000, 10_000)])
def test_equal_to_the_reference(fmt: str, block: int, requests: int, rows: int) -> None:
    check(arguments(fmt, requests, rows, block))


@FORMATS
def test_rows_apart_and_bounds_that_do_not_start_at_zero(fmt: str) -> None:
    cache, table, bounds, k, k_scale, *rest = arguments(fmt, 5, 900)
    wide, scale = torch.zeros(900, 400, device="cuda", dtype=k.dtype), torch.zeros(900, 9, device="cuda").byte()
    check((cache, table, bounds + 3, wide[:, 5 : 5 + k.shape[1]], scale[:, 2 : 2 + k_scale.shape[1]], *rest))
    check((cache, table[:2], bounds.long(), k, k_scale, *rest))


@FORMATS
def test_a_cache_of_more_than_2_31_bytes(fmt: str) -> None:
    cache, table, *rest = arguments(fmt, 7, 70_000)
    cache, added = behind_2_31_bytes(cache)
    check((cache, moved(table, added), *rest))


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments("indexer_fp8", 7, 3000)
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.cp_gather_indexer_k(*args)
    for _ in range(2):
        fresh = arguments("indexer_fp8", 7, 3000)
        for mine, new in zip(args[:3], fresh[:3], strict=True):
            mine.copy_(new)
        graph.replay()
        REFERENCE(*fresh)
        assert torch.equal(args[3], fresh[3]) and torch.equal(args[4], fresh[4])
