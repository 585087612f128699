"""The gathering kernel on a GPU, equal to the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import dequantize_and_gather_k_cache as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import hostile_indices, random_cache

REFERENCE = REFERENCES["dequantize_and_gather_k_cache"]
FORMATS = pytest.mark.parametrize("fmt", layout.KV_FORMATS)


def arguments(fmt: str, requests: int = 3, pages: int = 90, block: int = 64, **options: Any) -> tuple[Any, ...]:
    """All but `out`: requests of every length, pages that do not exist, a few longer than their tables."""
    cache = random_cache(fmt, pages, block, live=pages * block, device="cuda", **options)
    table = hostile_indices((requests, pages // 3), pages, fraction=0.1, device="cuda")
    lens = torch.randint(0, pages // 3 * block + 5, (requests,), device="cuda", dtype=torch.int32)
    tails = torch.minimum(lens + 2, torch.randint(1, 500, (requests,), device="cuda", dtype=torch.int32))
    return cache.cache, lens, tails, table, block, fmt, cache.kv_scale


def check(out: Tensor, args: tuple[Any, ...], offset: int, whole: bool = False) -> None:
    cache, lens, tails, table, block, fmt, kv_scale = args
    call = cache, lens, None if whole else tails, table, block, offset, fmt, kv_scale
    want = out.clone()
    kernel.dequantize_and_gather_k_cache(out, *call)
    REFERENCE(want, *call)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block", "offset"), [(64, 0), (64, 131), (2, 7), (24, 300)])
def test_equal_to_the_reference(fmt: str, dtype: torch.dtype, block: int, offset: int) -> None:
    args = arguments(fmt, block=block)
    check(torch.full((3, 700, 512), torch.nan, device="cuda", dtype=dtype), args, offset)
    check(torch.full((3, 2500, 512), torch.nan, device="cuda", dtype=dtype), args, offset, whole=True)


@FORMATS
def test_many_requests_and_rows_apart(fmt: str) -> None:
    args = arguments(fmt, requests=200)
    out = torch.full((200, 160, 1040), torch.nan, device="cuda", dtype=torch.bfloat16)
    check(out[:, 3:150, :1024:2], args, 10)


def test_caches_and_workspaces_beyond_two_gibibytes() -> None:
    cache, lens, tails, table, *rest = arguments("fp8_ds_mla")
    pages = 2**31 // layout.FP8_DS_MLA.page_stride(64) + 300
    large = layout.allocate_cache("fp8_ds_mla", pages, 64, device="cuda")
    large[-90:] = cache
    far = torch.where((table >= 0) & (table < 90), table + pages - 90, -1).int()
    out = torch.zeros(3, 2**21 // 3 + 1000, 512, device="cuda", dtype=torch.bfloat16)
    check(out, (large, lens, tails, far, *rest), out.shape[1] - 600)


def test_a_captured_launch_follows_its_inputs() -> None:
    args, out = arguments("fp8_ds_mla"), torch.zeros(3, 700, 512, device="cuda", dtype=torch.bfloat16)
    check(out, args, 9)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.dequantize_and_gather_k_cache(out, *args[:5], 9, *args[5:])
    for _ in range(2):
        args[1].random_(0, 1900)
        args[2].random_(0, 500)
        want = out.clone()
        REFERENCE(want, *args[:5], 9, *args[5:])
        graph.replay()
        assert torch.equal(out, want)
