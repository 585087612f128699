from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.reference.common import kv_format, paging
from dsv4_compile.testing import (
    assert_bitwise,
    hostile_indices,
    hostile_values,
    padded,
    poison_,
    poisoned_empty,
    random_cache,
    strided,
)

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("bound", [0, 1, 640, 2**31 - 1])
def test_hostile_values_are_outside_and_fit_int32(bound: int) -> None:
    values = hostile_values(bound)
    assert all(not 0 <= value < bound and -(2**31) <= value < 2**31 for value in values)
    assert {-(2**31), -1} <= set(values)


def test_hostile_indices_mix_legal_and_every_hostile_value() -> None:
    drawn = set(hostile_indices((4000,), 7).tolist())
    assert drawn == set(range(7)) | set(hostile_values(7))


@pytest.mark.parametrize(("fraction", "bound", "legal"), [(0.0, 5, True), (1.0, 5, False), (0.0, 0, False)])
def test_hostile_fraction_is_respected(fraction: float, bound: int, legal: bool) -> None:
    indices = hostile_indices((3, 50), bound, fraction=fraction, dtype=torch.int64)
    assert indices.dtype is torch.int64
    assert (((indices >= 0) & (indices < bound)) == legal).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_noticed(dtype: torch.dtype) -> None:
    x = poison_(torch.zeros(3, 4).to(dtype)[:, 1:3])
    if dtype.is_floating_point:
        assert x.float().isnan().all()
    elif dtype is torch.uint8:
        assert x.view(torch.float8_e4m3fn).float().isnan().all()
        assert x.contiguous().view(torch.bfloat16).isnan().all()
    else:
        assert ((x < 0) | (x == torch.ones((), dtype=dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 1), (3, 0, 2), (4, 2, 6)])
@pytest.mark.parametrize("spread", [padded, strided])
def test_spread_copies_keep_values_and_leave_gaps(spread: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    y = spread(x)
    assert_bitwise(y, x)
    if x.dim() and x.numel():
        assert y.storage_offset() > 0
        assert y.stride(-1) == (1 if spread is padded else 2)
        assert all(a > b for a, b in zip(y.stride(), x.stride(), strict=True) if spread is strided or b > 1)


def test_padded_rows_keep_sixteen_byte_alignment() -> None:
    assert padded(torch.zeros(4, 512, dtype=torch.bfloat16)).data_ptr() % 16 == 0


@pytest.mark.parametrize("fmt", [*layout.KV_FORMATS, "indexer_fp8", "indexer_mxfp4"])
@pytest.mark.parametrize("block_size", [2, 64])
def test_random_cache_holds_its_values_and_poison(fmt: str, block_size: int) -> None:
    sample = random_cache(fmt, 3, block_size, live=block_size)
    assert sample.slots.unique().numel() == block_size
    load = kv_format.load_indexer if fmt.startswith("indexer") else kv_format.load_kv
    stored = load(
        sample.cache, fmt, block_size, sample.slots, *([sample.kv_scale] if sample.kv_scale is not None else [])
    ).float()
    assert (stored - sample.values).abs().max() < (1.0 if fmt == "indexer_mxfp4" else 0.2)
    free = torch.tensor(sorted(set(range(3 * block_size)) - set(sample.slots.tolist())))
    if fmt in layout.PAGE_LAYOUTS:
        assert all((field == 0xFF).all() for field in paging.read_bytes(sample.cache, fmt, block_size, free))
    else:
        rows = paging.read_rows(sample.cache, block_size, free)
        assert (rows.isnan() if rows.dtype.is_floating_point else rows == 0xFF).all()
    assert sample.cache.stride(0) > sample.cache[0].numel() or fmt == "indexer_mxfp4"
    assert sample.block_size == block_size


def test_random_cache_is_legal_for_the_layout() -> None:
    cache = random_cache("fp8_ds_mla", 2, 64).cache
    assert cache.stride(0) == layout.FP8_DS_MLA.page_stride(64)
    assert layout.byte_pages(cache, "fp8_ds_mla", 64) is cache


def test_random_cache_refuses_an_unknown_format() -> None:
    with pytest.raises(InputError, match="E202"):
        random_cache("fp7", 1, 1)


def test_compressor_state_is_plain_float32() -> None:
    state = random_cache("plain", 2, 4, head_dim=2048, dtype=torch.float32)
    assert state.cache.shape == (2, 4, 2048)
    assert_bitwise(kv_format.load_kv(state.cache, "plain", 4, state.slots), state.values)


def test_poisoned_empty_fills_and_restores() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(ZeroDivisionError), poisoned_empty():
        assert torch.empty(100).isnan().all()
        assert (torch.empty_like(torch.zeros(7, dtype=torch.int32)) == 2**31 - 1).all()
        _ = 1 // 0
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
