"""The kernel of `sparse_mla_mixed` against the reference, every access checked, and compiled for every GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_mixed as kernel
from dsv4_compile.kernels.attention.sparse_mla_mixed import Tiles
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.attention.sparse_mla_mixed import MixedArguments
from dsv4_compile.reference.common.row_format import store_rows
from dsv4_compile.testing import assert_bitwise, assert_close, padded, poison_, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import GPUS, shared_out
from tests.support import fake_triton
from tests.support.bounds import checked, random_program_order
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
REFERENCE = REFERENCES["sparse_mla_mixed"]
OUTPUTS = ("p_out", "p_lse", "p_partial", "p_partial_lse")
PAGES, PAGE = 6, 8
SLOTS = PAGES * PAGE
TILES = [Tiles(16, 16, 4), Tiles(16, 16, 4, keys_first=True)]
MODEL = ("mxfp8", "nvfp4")


def cache_of(fmt: str, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a full cache of rows that a model could have stored, its page padding NaN."""
    cache = layout.allocate_cache(fmt, PAGES, PAGE, dim, dtype=dtype)
    poison_(torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage()))
    store_rows(cache, fmt, PAGE, torch.arange(SLOTS), torch.randn(SLOTS, dim) * 2)
    return cache


def arguments(
    tokens: int = 3,
    heads: int = 5,
    window: int = 20,
    entries: int = 37,
    formats: tuple[str, str] = MODEL,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> MixedArguments:
    """Return a call with padding among its slots; without an entry format, of a window alone."""

    def slots(width: int) -> Tensor:
        return torch.where(torch.rand(tokens, width) < 0.2, -1, torch.randint(SLOTS, (tokens, width))).int()

    caches = [cache_of(fmt, dim, cache_dtype or dtype) if fmt else None for fmt in formats]
    second = slots(entries) if formats[1] else None
    q, sink = torch.randn(tokens, heads, dim).to(dtype), torch.randn(heads)
    first = caches[0]
    assert first is not None
    rows = first, slots(window), caches[1], second
    return MixedArguments(q, *rows, formats[0], PAGE, formats[1] or "plain", PAGE, dim**-0.5, sink)


def launch(a: MixedArguments, tiles: Tiles | None = None, splits: int = 0) -> Tensor:
    """Run the kernel, every access checked, programs in random order, over poisoned memory."""
    with checked(OUTPUTS) as launched, random_program_order(), poisoned_empty():
        out = kernel.launch(a, gpu_of(a.q.device), splits, tiles)
    if splits:
        assert launched == ["sparse_mla_mixed_kernel", *["combine_splits_kernel"] * (splits > 1)]
    return out


def check(a: MixedArguments, tiles: Tiles | None = None, splits: int = 1) -> Tensor:
    """Check that the kernel agrees with the reference as well as its operands' dtype allows."""
    out, want = launch(a, tiles, splits), REFERENCE(*a)
    assert (out.dtype, out.shape, out.is_contiguous()) == (want.dtype, want.shape, True)
    exact = kernel.operand_dtype(a) is torch.float32 and out.dtype is torch.float32
    assert_close(out, want, "attention_float32" if exact else "attention_few_keys", label="out")
    return out


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("sparse_mla_mixed"))))
def test_samples(number: int) -> None:
    check(MixedArguments(*op_samples("sparse_mla_mixed")[number]), splits=0)


FORMATS = [MODEL, ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp8", ""), ("nvfp4", "plain"), ("plain", "plain")]


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiles", TILES, ids=["heads_first", "keys_first"])
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_every_pair_of_formats_tiling_and_split(formats: tuple[str, str], tiles: Tiles, splits: int) -> None:
    check(arguments(formats=formats), tiles, splits)


@interpreted
@pytest.mark.parametrize("formats", [MODEL, ("fp8_ds_mla", "fp8_ds_mla"), ("mxfp8", "fp8_ds_mla")], ids="-".join)
def test_rows_of_512_channels(formats: tuple[str, str]) -> None:
    check(arguments(2, 17, formats=formats, dim=512), splits=2)


@interpreted
@pytest.mark.parametrize("heads", [1, 16, 33, 64])
def test_any_number_of_heads(heads: int) -> None:
    check(arguments(2, heads), splits=2)


@interpreted
@pytest.mark.parametrize(("dim", "formats"), [(4, ("plain", "plain")), (48, ("plain", "nvfp4")), (96, MODEL)])
def test_any_number_of_channels(dim: int, formats: tuple[str, str]) -> None:
    check(arguments(dim=dim, formats=formats), splits=2)


@interpreted
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float32, torch.float32), (torch.float16, torch.float16)])
@pytest.mark.parametrize("formats", [MODEL, ("plain", "plain"), ("plain", "nvfp4")], ids="-".join)
def test_queries_and_plain_rows_of_other_dtypes(
    dtype: torch.dtype, cache_dtype: torch.dtype, formats: tuple[str, str]
) -> None:
    check(arguments(dtype=dtype, cache_dtype=cache_dtype, formats=formats), splits=2)


@interpreted
def test_more_splits_than_blocks_leave_some_without_keys() -> None:
    check(arguments(), TILES[0], 9)


@interpreted
@pytest.mark.parametrize(("window", "entries"), [(0, 0), (1, 0), (0, 1), (16, 16), (17, 1)])
def test_any_width(window: int, entries: int) -> None:
    for splits in (1, 2):
        out = check(arguments(window=window, entries=entries), TILES[0], splits)
        assert window + entries > 0 or out.abs().max() == 0


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_tokens_without_keys_get_zeros_and_unused_rows_of_nan_stay_out(splits: int) -> None:
    a = arguments(formats=("plain", "plain"))
    assert a.entries is not None and a.entry_slots is not None
    a.window_slots[1], a.entry_slots[1] = -1, SLOTS
    used = {*a.window_slots.flatten().tolist(), *a.entry_slots.flatten().tolist()}
    for cache in (a.window, a.entries):
        cache.flatten(0, 1)[[slot for slot in range(SLOTS) if slot not in used]] = math.nan
    out = check(a, TILES[0], splits)
    assert out[1].abs().max() == 0 and not out.isnan().any()


@interpreted
def test_scales_of_nan_in_unused_rows_stay_out() -> None:
    a = arguments()
    slots = torch.full_like(a.window_slots, 3)
    want = launch(a._replace(window_slots=slots), TILES[0], 2)
    others = torch.tensor([slot for slot in range(SLOTS) if slot != 3])
    store_rows(a.window, "mxfp8", PAGE, others, torch.full((SLOTS - 1, 64), math.nan))
    assert_bitwise(launch(a._replace(window_slots=slots), TILES[0], 2), want)


@interpreted
def test_hostile_slots_are_no_keys() -> None:
    a = arguments()
    assert a.entry_slots is not None
    wide = [
        torch.where(slots < 0, bad, slots.long()) for slots, bad in ((a.window_slots, 2**32), (a.entry_slots, SLOTS))
    ]
    want = launch(a, TILES[0], 2)
    assert_bitwise(launch(a._replace(window_slots=wide[0], entry_slots=wide[1]), TILES[0], 2), want)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_do_not_matter(spread: Any) -> None:
    for formats in (MODEL, ("plain", "plain")):
        a = arguments(formats=formats)
        assert a.entries is not None and a.entry_slots is not None
        caches = map(spread, (a.window, a.entries)) if formats[0] == "plain" else map(padded, (a.window, a.entries))
        window, entries = caches
        q, window_slots, entry_slots, sink = map(spread, (a.q, a.window_slots, a.entry_slots, a.sink))
        b = MixedArguments(q, window, window_slots, entries, entry_slots, *a[5:-1], sink)
        for splits in (1, 2):
            assert_bitwise(launch(b, TILES[1], splits), launch(a, TILES[1], splits))


@interpreted
def test_caches_without_pages_and_no_token() -> None:
    a = arguments()
    assert a.entries is not None
    assert check(a._replace(window=a.window[:0], entries=a.entries[:0])).abs().max() == 0
    assert check(arguments(tokens=0), splits=0).shape == (0, 5, 64)


@interpreted
@pytest.mark.parametrize("sink", [-math.inf, 80.0])
def test_a_sink_takes_its_share_of_the_denominator(sink: float) -> None:
    a = arguments()
    for splits in (1, 3):
        check(a._replace(sink=torch.full_like(a.sink, sink)), TILES[0], splits)


@interpreted
def test_more_tokens_than_partial_results_fit_take_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    a = arguments(tokens=5)
    want = launch(a, TILES[0], 2)
    monkeypatch.setattr("dsv4_compile.kernels.attention.split_combine.MAX_PARTIAL_BYTES", 2 * 2 * 5 * 64 * 4)
    kernel.plan.cache_clear()
    with checked(OUTPUTS) as launched:
        out = kernel.launch(a, gpu_of(a.q.device), 2, TILES[0])
    kernel.plan.cache_clear()
    assert len(launched) == 6
    assert_bitwise(out, want)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "formats", "operands"),
    [
        (torch.bfloat16, torch.bfloat16, MODEL, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, ("plain", "fp8_ds_mla"), torch.bfloat16),
        (torch.bfloat16, torch.float32, ("plain", "nvfp4"), torch.float32),
        (torch.float16, torch.float16, ("plain", ""), torch.float16),
        (torch.float16, torch.float16, ("plain", "nvfp4"), torch.float32),
        (torch.float32, torch.float32, MODEL, torch.float32),
    ],
)
def test_operands_lose_nothing(
    dtype: torch.dtype, cache_dtype: torch.dtype, formats: tuple[str, str], operands: torch.dtype
) -> None:
    assert kernel.operand_dtype(arguments(1, 1, 1, 1, formats, 512, dtype, cache_dtype)) is operands


def test_unsupported_calls_have_a_reason() -> None:
    a = arguments()
    assert kernel.why_unsupported_sparse_mla_mixed(a) == ""
    wide = a._replace(q=torch.empty(1, 1, 544))
    assert "544 channels" in kernel.why_unsupported_sparse_mla_mixed(wide)
    assert "slots" in kernel.why_unsupported_sparse_mla_mixed(a._replace(window_block_size=2**31))


COMPILED = [
    (MODEL, 64, 1),
    (MODEL, 64, 300),
    (("fp8_ds_mla", "fp8_ds_mla"), 64, 1),
    (("plain", "plain"), 8, 1),
    (("mxfp8", ""), 16, 300),
]
"""Formats, heads and tokens."""


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    gpu, shared = GPUS[target]
    cases = shared_out(COMPILED)[target]
    with compiled_for(target) as compiled:
        for formats, heads, tokens in cases:
            a = arguments(1, heads, 128, 512, formats, 512)
            slots = [None if x is None else x.expand(tokens, -1) for x in (a.window_slots, a.entry_slots)]
            q = a.q.expand(tokens, -1, -1).contiguous()
            kernel.launch(a._replace(q=q, window_slots=slots[0], entry_slots=slots[1]), gpu)
    assert all(binary.assembled and binary.metadata.shared <= shared * 1024 for binary in compiled)
    names = [binary.metadata.name for binary in compiled]
    assert names.count("sparse_mla_mixed_kernel") == len(cases)


@pytest.mark.parametrize("formats", [MODEL, ("fp8_ds_mla", "fp8_ds_mla")], ids="-".join)
def test_rows_of_the_model_do_not_spill(formats: tuple[str, str]) -> None:
    with compiled_for("sm_90") as compiled:
        kernel.launch(arguments(1, 64, 128, 512, formats, 512), GPUS["sm_90"][0])
    assert [binary.resources()["STACK"] for binary in compiled] == [0, 0]
