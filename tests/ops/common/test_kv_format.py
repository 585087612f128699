"""What a stored row means, byte by byte, against the scalar oracle."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import assert_bitwise, poison_
from tests.support import scalar


def poisoned_pages(fmt: str, blocks: int, block_size: int, stride: int) -> tuple[Tensor, Tensor]:
    """Storage full of 0xFF, and the cache in it: pages `stride` bytes apart."""
    storage = poison_(torch.empty(blocks * stride, dtype=torch.uint8))
    return storage, storage.as_strided((blocks, layout.PAGE_LAYOUTS[fmt].page_bytes(block_size)), (stride, 1))


def vectors(rows: int, dim: int) -> Tensor:
    """float32 rows of magnitudes from 1e-6 to 1e4, with a zero row and a row that saturates nothing."""
    x = torch.randn(rows, dim) * torch.logspace(-6, 4, rows)[:, None]
    x[0] = 0
    return x


@pytest.mark.parametrize(
    ("block_size", "stride"), [(2, 1728), (2, 1168), (2, 1171), (64, 37440)], ids=["2", "2 tight", "2 odd", "64"]
)
def test_fp8_ds_mla_bytes_are_exact_and_nothing_else_is_written(block_size: int, stride: int) -> None:
    storage, cache = poisoned_pages("fp8_ds_mla", 3, block_size, stride)
    slots = torch.randperm(3 * block_size)[:5]
    x = vectors(5, layout.HEAD_DIM)
    expected = bytearray(storage.tolist())
    for slot, row in zip(slots.tolist(), x.tolist(), strict=True):
        scalar.store(expected, "fp8_ds_mla", stride, block_size, slot, *scalar.mla_row(row))
    kv_format.store_kv(cache, "fp8_ds_mla", block_size, slots, x)
    assert_bitwise(storage, torch.tensor(list(expected), dtype=torch.uint8))


def test_fp8_ds_mla_first_and_last_row_of_the_last_page() -> None:
    storage, cache = poisoned_pages("fp8_ds_mla", 2, 64, 37440)
    kv_format.store_kv(cache, "fp8_ds_mla", 64, torch.tensor([64, 127]), torch.full((2, 512), 7.0))
    for address, scales in ((37440, 74304), (37440 + 36288, 37440 + 37368)):
        assert storage[address : address + 448].view(torch.float8_e4m3fn).float().unique().tolist() == [448.0]
        assert storage[address + 448 : address + 576].view(torch.bfloat16).float().unique().tolist() == [7.0]
        assert storage[scales : scales + 8].tolist() == [121] * 7 + [0]


def test_fp8_ds_mla_rounds_to_bfloat16_before_it_looks_for_the_scale() -> None:
    _, cache = poisoned_pages("fp8_ds_mla", 1, 2, 1728)
    # 448 and 450 are neighbours in bfloat16: 448.9 rounds down to the first, 449.1 up to the second.
    x = torch.zeros(2, 512)
    x[0, 0], x[1, 0] = 448.9, 449.1
    kv_format.store_kv(cache, "fp8_ds_mla", 2, torch.tensor([0, 1]), x)
    assert [cache[0, 1152].item(), cache[0, 1160].item()] == [127, 128]


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_stored_vectors_are_loaded_as_the_format_defines_them(fmt: str) -> None:
    cache = layout.allocate_cache(fmt, 3, 4, dtype=torch.bfloat16)
    slots, x = torch.tensor([7, 0, 11]), vectors(3, 512)
    kv_scale = torch.tensor([30.0]) if fmt == "fp8" else None
    kv_format.store_kv(cache, fmt, 4, slots, x, kv_scale)
    got = kv_format.load_kv(cache, fmt, 4, slots, kv_scale)
    want = torch.tensor([[_decode(fmt, row, column) for column in range(512)] for row in x.tolist()])
    assert_bitwise(got, want.bfloat16())
    assert_bitwise(want.bfloat16().float(), want)


def _decode(fmt: str, row: list[float], column: int) -> float:
    """What one element is after it was stored and loaded."""
    rounded = [scalar.bf16(v) for v in row]
    if fmt == "plain" or (fmt == "fp8_ds_mla" and column >= 448):
        return rounded[column]
    if fmt == "fp8":
        inverse = scalar.f32(1 / 30)
        return scalar.bf16(scalar.f32(30 * scalar.e4m3_value(scalar.e4m3_code(scalar.f32(row[column] * inverse)))))
    tile = rounded[column // 64 * 64 : column // 64 * 64 + 64]
    values, byte = scalar.quantize_tile(tile, 1e-4)
    return scalar.e4m3_value(values[column % 64]) * 2.0 ** (byte - 127)


def test_per_tensor_fp8_quantises_straight_from_float32() -> None:
    """Through bfloat16 first, 1.0627 would become 1.0625, a tie, and round down instead of up."""
    cache = layout.allocate_cache("fp8", 1, 1, 2)
    kv_format.store_kv(cache, "fp8", 1, torch.tensor([0]), torch.tensor([[1.0627, -1000.0]]))
    assert cache.view(torch.float8_e4m3fn).float().flatten().tolist() == [1.125, -448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_rows_are_rounded_to_the_dtype_of_the_cache(dtype: torch.dtype) -> None:
    cache = layout.allocate_cache("plain", 2, 2, 8, dtype=dtype)
    x = torch.randn(1, 8)
    kv_format.store_kv(cache, "plain", 2, torch.tensor([3]), x)
    assert_bitwise(kv_format.load_kv(cache, "plain", 2, torch.tensor([3])), x.to(dtype))
    assert not cache.flatten(0, 1)[:3].any()


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_invalid_slots_load_zeros_from_a_cache_full_of_nan(fmt: str) -> None:
    cache = poison_(layout.allocate_cache(fmt, 2, 2, dtype=torch.bfloat16))
    slots = torch.tensor([[-1, 4], [-(2**31), 2**31 - 1]])
    got = kv_format.load_kv(cache, fmt, 2, slots)
    assert_bitwise(got, torch.zeros(2, 2, 512, dtype=torch.bfloat16))


def test_indexer_fp8_bytes_are_exact_and_nothing_else_is_written() -> None:
    storage, cache = poisoned_pages("indexer_fp8", 3, 64, 8640)
    slots, x = torch.tensor([0, 65, 191]), vectors(3, 128)
    expected = bytearray(storage.tolist())
    for slot, row in zip(slots.tolist(), x.tolist(), strict=True):
        data, byte = scalar.quantize_tile([scalar.bf16(v) for v in row], 1e-4)
        scalar.store(expected, "indexer_fp8", 8640, 64, slot, data, struct.pack("<f", 2.0 ** (byte - 127)))
    kv_format.store_indexer(cache, "indexer_fp8", 64, slots, x)
    assert_bitwise(storage, torch.tensor(list(expected), dtype=torch.uint8))


def test_indexer_mxfp4_bytes_are_exact_and_nothing_else_is_written() -> None:
    storage, cache = poisoned_pages("indexer_mxfp4", 2, 64, 4608)
    slots, x = torch.tensor([127, 3]), vectors(2, 128)
    expected = bytearray(storage.tolist())
    for slot, row in zip(slots.tolist(), x.tolist(), strict=True):
        rounded = [scalar.bf16(v) for v in row]
        exponents = [
            scalar.ue8m0_exponent(max(layout.MXFP4_AMAX_FLOOR, *map(abs, rounded[i : i + 32])), 6.0)
            for i in range(0, 128, 32)
        ]
        code = [scalar.e2m1_code(v * 2.0 ** -exponents[i // 32]) for i, v in enumerate(rounded)]
        data = bytes(code[i] | code[i + 1] << 4 for i in range(0, 128, 2))
        scalar.store(expected, "indexer_mxfp4", 4608, 64, slot, data, bytes(e + 127 for e in exponents))
    kv_format.store_indexer(cache, "indexer_mxfp4", 64, slots, x)
    assert_bitwise(storage, torch.tensor(list(expected), dtype=torch.uint8))


@pytest.mark.parametrize("fmt", ["indexer_fp8", "indexer_mxfp4", "plain"])
def test_indexer_keys_are_loaded_with_their_scales(fmt: str) -> None:
    cache = layout.allocate_cache(fmt, 2, 4, 128, dtype=torch.bfloat16)
    x = torch.randn(3, 128).bfloat16().float()
    kv_format.store_indexer(cache, fmt, 4, torch.tensor([5, -1, 2]), x)
    got = kv_format.load_indexer(cache, fmt, 4, torch.tensor([5, -1, 2]))
    assert got.dtype is torch.float32
    assert not got[1].any()
    # Half a step of the coarsest element: 2^-4 relative in e4m3, up to 1/3 of the tile's maximum in e2m1.
    bound = {"indexer_fp8": 2**-4, "indexer_mxfp4": 1 / 3, "plain": 0.0}[fmt]
    assert ((got - x)[[0, 2]].abs() <= bound * x[[0, 2]].abs().amax(-1, keepdim=True)).all()


def test_formats_that_fix_the_width_refuse_another() -> None:
    cache = layout.allocate_cache("fp8_ds_mla", 1, 2)
    with pytest.raises(InputError, match=r"E201.*\n.*\n.*64 dims"):
        kv_format.store_kv(cache, "fp8_ds_mla", 2, torch.tensor([0]), torch.zeros(1, 64))
    cache = layout.allocate_cache("indexer_fp8", 1, 2)
    with pytest.raises(InputError, match="E201"):
        kv_format.store_indexer(cache, "indexer_fp8", 2, torch.tensor([0]), torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("call", "fmt"),
    [
        (kv_format.store_kv, "int4"),
        (kv_format.store_kv, "indexer_fp8"),
        (kv_format.store_indexer, "int4"),
        (kv_format.store_indexer, "fp8_ds_mla"),
    ],
)
def test_a_format_that_is_unknown_or_of_the_other_cache_is_refused(call: Callable[..., None], fmt: str) -> None:
    with pytest.raises(InputError, match="E202"):
        call(torch.zeros(1, 2, 128), fmt, 2, torch.tensor([0]), torch.zeros(1, 128))
