from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.errors import InputError


@pytest.mark.parametrize(
    ("fmt", "block_size", "used", "stride"),
    [
        ("fp8_ds_mla", 2, 1168, 1728),
        ("fp8_ds_mla", 32, 18688, 19008),
        ("fp8_ds_mla", 64, 37376, 37440),
        ("fp8_ds_mla", 256, 149504, 149760),
        ("indexer_fp8", 64, 8448, 8640),
        ("indexer_mxfp4", 64, 4352, 4608),
    ],
)
def test_pages_are_as_far_apart_as_published(fmt: str, block_size: int, used: int, stride: int) -> None:
    geometry = layout.PAGE_LAYOUTS[fmt]
    assert geometry.page_bytes(block_size) == used
    assert geometry.page_stride(block_size) == stride


@pytest.mark.parametrize(
    ("fmt", "block_size", "slot", "data", "scale"),
    [
        ("fp8_ds_mla", 64, 0, 0, 36864),
        ("fp8_ds_mla", 64, 63, 36288, 37368),
        ("fp8_ds_mla", 64, 64, 37440, 74304),
        ("fp8_ds_mla", 64, 130, 76032, 111760),
        ("fp8_ds_mla", 2, 0, 0, 1152),
        ("fp8_ds_mla", 2, 1, 576, 1160),
        ("fp8_ds_mla", 2, 5, 4032, 4616),
        ("indexer_fp8", 64, 0, 0, 8192),
        ("indexer_fp8", 64, 65, 8640 + 128, 8640 + 8192 + 4),
    ],
)
def test_a_slot_has_its_published_addresses(fmt: str, block_size: int, slot: int, data: int, scale: int) -> None:
    geometry = layout.PAGE_LAYOUTS[fmt]
    page, offset = slot // block_size * geometry.page_stride(block_size), slot % block_size
    assert page + geometry.data_offset(offset) == data
    assert page + geometry.scale_offset(offset, block_size) == scale


@pytest.mark.parametrize("fmt", sorted(layout.PAGE_LAYOUTS))
@pytest.mark.parametrize("block_size", [1, 2, 8, 64])
def test_rows_of_a_page_neither_overlap_nor_leave_it(fmt: str, block_size: int) -> None:
    geometry = layout.PAGE_LAYOUTS[fmt]
    owned: list[int] = []
    for offset in range(block_size):
        owned += range(geometry.data_offset(offset), geometry.data_offset(offset) + geometry.data)
        first = geometry.scale_offset(offset, block_size)
        owned += range(first, first + geometry.scale)
    assert sorted(owned) == list(range(geometry.page_bytes(block_size)))


def test_offsets_of_tensors_are_those_of_ints() -> None:
    offsets = torch.arange(64)
    geometry = layout.FP8_DS_MLA
    assert geometry.data_offset(offsets).tolist() == [geometry.data_offset(i) for i in range(64)]
    assert geometry.scale_offset(offsets, 64).tolist() == [geometry.scale_offset(i, 64) for i in range(64)]


@pytest.mark.parametrize(("ratio", "entries", "tokens", "groups"), [(4, 64, 4, 2), (128, 2, 8, 1)])
def test_pages_of_compressed_layers(ratio: int, entries: int, tokens: int, groups: int) -> None:
    assert layout.storage_block_size(ratio) == entries
    assert layout.state_block_size(ratio) == tokens
    assert layout.overlap_factor(ratio) == groups


@pytest.mark.parametrize(("ratio", "dim", "width"), [(4, 512, 2048), (128, 512, 1024), (4, 128, 512)])
def test_state_rows_have_their_published_width(ratio: int, dim: int, width: int) -> None:
    assert layout.state_width(ratio, dim) == width


@pytest.mark.parametrize(
    ("max_model_len", "width"), [(1, 128), (128, 128), (16384, 128), (16385, 256), (1 << 20, 8192)]
)
def test_c128a_rows_hold_every_entry_and_stay_aligned(max_model_len: int, width: int) -> None:
    assert layout.c128a_width(max_model_len) == width


@pytest.mark.parametrize(
    ("fmt", "shape", "stride", "dtype"),
    [
        ("fp8_ds_mla", (3, 1168), (1728, 1), torch.uint8),
        ("indexer_fp8", (3, 264), (576, 1), torch.uint8),
        ("indexer_mxfp4", (3, 136), (576, 1), torch.uint8),
        ("plain", (3, 2, 64), (128, 64, 1), torch.float32),
        ("fp8", (3, 2, 64), (128, 64, 1), torch.uint8),
    ],
)
def test_allocated_caches_are_zero_and_padded(
    fmt: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> None:
    cache = layout.allocate_cache(fmt, 3, 2, 64, dtype=torch.float32)
    assert (cache.shape, cache.stride(), cache.dtype) == (shape, stride, dtype)
    assert cache.untyped_storage().nbytes() == 3 * stride[0] * cache.element_size()
    assert not cache.any()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match=r"E202.*\n.*\n.*int8"):
        layout.cache_shape("int8", 1, 2, 64)


def test_the_accounting_view_is_the_same_pages() -> None:
    cache = layout.allocate_cache("fp8_ds_mla", 3, 2)
    accounting = cache.unflatten(1, (2, 584))
    for view in (cache, accounting):
        pages = layout.byte_pages(view, "fp8_ds_mla", 2)
        assert pages.shape == (3, 1168)
        assert pages.stride() == (1728, 1)
        assert pages.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(torch.zeros(3, 1168), id="floats"),
        pytest.param(torch.zeros(3, 1728, dtype=torch.uint8), id="padding counted as page"),
        pytest.param(torch.zeros(3, 4, 584, dtype=torch.uint8), id="another block size"),
        pytest.param(torch.zeros(1168, 3, dtype=torch.uint8).t(), id="bytes apart"),
        pytest.param(torch.zeros(3, 2, 600, dtype=torch.uint8)[..., :584], id="rows apart"),
    ],
)
def test_pages_of_another_layout_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"E203.*\n.* 1168 bytes.*\n  got   an_op: .*\n.*1168\] or \[P, 2, 584\]"):
        layout.byte_pages(cache, "fp8_ds_mla", 2, "an_op")
