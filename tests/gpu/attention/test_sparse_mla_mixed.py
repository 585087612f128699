"""`sparse_mla_mixed` on a GPU at the sizes of DeepSeek-V4.1: 64 heads, a window of 128 and 512 entries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_mixed as kernel
from dsv4_compile.kernels.attention import sparse_mla_mixed_sm90 as sm90
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.attention.sparse_mla_mixed import MixedArguments
from dsv4_compile.reference.common.row_format import store_rows
from dsv4_compile.testing import assert_close
from tests.gpu.far import behind_2_31_bytes, moved

REFERENCE = REFERENCES["sparse_mla_mixed"]
PAGES, PAGE = 40, 64
SLOTS = PAGES * PAGE
FORMATS = [("mxfp8", "nvfp4"), ("mxfp8", ""), ("fp8_ds_mla", "fp8_ds_mla"), ("plain", "plain"), ("mxfp8", "mxfp8")]


def cache_of(fmt: str, dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    cache = layout.allocate_cache(fmt, PAGES, PAGE, dim, dtype=dtype, device="cuda")
    rows = torch.randn(SLOTS, dim, device="cuda", generator=generator)
    store_rows(cache, fmt, PAGE, torch.arange(SLOTS, device="cuda"), rows)
    return cache


def arguments(
    tokens: int,
    heads: int = 64,
    formats: tuple[str, str] = FORMATS[0],
    dtype: torch.dtype = torch.bfloat16,
    *,
    dim: int = 512,
    widths: tuple[int, int] = (128, 512),
    seed: int = 0,
) -> MixedArguments:
    """Return a call with a tenth of all slots invalid, and none for the first token of several."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def slots(width: int) -> Tensor:
        picked = torch.randint(-SLOTS // 10, SLOTS, (tokens, width), device="cuda", generator=generator)
        picked = picked.clamp_min(-1).int()
        if tokens > 1:
            picked[0] = -1
        return picked

    window, entries = (cache_of(fmt or "plain", dim, dtype, generator) for fmt in formats)
    second = (entries, slots(widths[1])) if formats[1] else (None, None)
    q = torch.randn(tokens, heads, dim, device="cuda", generator=generator).to(dtype)
    sink = torch.randn(heads, device="cuda", generator=generator)
    sizes = formats[0], PAGE, formats[1] or "plain", PAGE
    return MixedArguments(q, window, slots(widths[0]), *second, *sizes, dim**-0.5, sink)


def check(a: MixedArguments, **options: Any) -> Tensor:
    """Check both kernels, the one for sm_90 where it supports the call, and return the result of the op's."""
    gpu, want = gpu_of(a.q.device), REFERENCE(*a)
    results = [kernel.launch(a, gpu, **options)]
    if not sm90.why_unsupported(a):
        results.append(sm90.launch(a, gpu, **options))
    keys = a.window_slots.shape[1] + (0 if a.entry_slots is None else a.entry_slots.shape[1])
    few = "attention_few_keys" if keys < 300 else "attention_bfloat16"
    for out in results:
        assert_close(out, want, "attention_float32" if out.dtype is torch.float32 else few)
    return results[-1]


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 2, 6, 32, 129, 600])
def test_results_are_those_of_the_reference(tokens: int, formats: tuple[str, str]) -> None:
    out = check(arguments(tokens, formats=formats))
    assert tokens == 1 or out[0].abs().max() == 0


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 128])
@pytest.mark.parametrize("tokens", [1, 33])
def test_heads_of_a_rank(tokens: int, heads: int) -> None:
    check(arguments(tokens, heads))


@pytest.mark.parametrize("splits", [1, 2, 7, 20, 33])
@pytest.mark.parametrize("tokens", [3, 40])
def test_every_number_of_splits(tokens: int, splits: int) -> None:
    check(arguments(tokens), splits=splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("formats", [FORMATS[0], ("plain", "plain"), ("plain", "nvfp4")], ids="-".join)
def test_queries_and_plain_rows_of_other_dtypes(dtype: torch.dtype, formats: tuple[str, str]) -> None:
    check(arguments(5, 20, formats, dtype))


@pytest.mark.parametrize("dim", [32, 64, 96, 256])
def test_other_numbers_of_channels(dim: int) -> None:
    check(arguments(5, 20, dim=dim))


@pytest.mark.parametrize("widths", [(0, 0), (1, 0), (0, 1), (33, 17), (128, 2048)])
def test_other_widths(widths: tuple[int, int]) -> None:
    check(arguments(5, widths=widths))
    check(arguments(300, widths=widths))


def test_unused_rows_of_nan_stay_out() -> None:
    a = arguments(9)
    assert a.entries is not None and a.entry_slots is not None
    for cache, slots, fmt in ((a.window, a.window_slots, "mxfp8"), (a.entries, a.entry_slots, "nvfp4")):
        used = torch.zeros(SLOTS, dtype=torch.bool, device="cuda")
        used[slots[slots >= 0].long()] = True
        unused = (~used).nonzero().flatten()
        store_rows(cache, fmt, PAGE, unused, torch.full((len(unused), 512), math.nan, device="cuda"))
    assert not check(a).isnan().any()


@pytest.mark.parametrize("heads", [16, 64])
def test_70_000_tokens_over_caches_of_more_than_2_31_bytes(heads: int) -> None:
    a = arguments(64, heads=heads, widths=(16, 24))
    assert a.entries is not None and a.entry_slots is not None
    want, row = REFERENCE(*a), torch.arange(70_000, device="cuda") % 64
    (window, before), (entries, earlier) = behind_2_31_bytes(a.window), behind_2_31_bytes(a.entries)
    slots = moved(a.window_slots, PAGE * before)[row], moved(a.entry_slots, PAGE * earlier)[row]
    far = a._replace(q=a.q[row], window=window, window_slots=slots[0], entries=entries, entry_slots=slots[1])
    out = kernel.sparse_mla_mixed(far)
    assert_close(out[:64], want, "attention_few_keys")
    assert torch.equal(out, out[:64][row])


def test_a_repeated_call_gives_the_same_bits() -> None:
    for tokens in (1, 8, 40, 500):
        a = arguments(tokens)
        first = kernel.sparse_mla_mixed(a)
        assert all(torch.equal(kernel.sparse_mla_mixed(a), first) for _ in range(100))


def test_a_captured_launch_follows_its_inputs() -> None:
    a = arguments(8)
    kernel.sparse_mla_mixed(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.sparse_mla_mixed(a)
    for seed in (3, 4):
        for mine, new in zip(a, arguments(8, seed=seed), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        graph.replay()
        assert torch.equal(out, kernel.sparse_mla_mixed(a))
