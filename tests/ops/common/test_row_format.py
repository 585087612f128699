"""Grids of DeepSeek-V4.1: published bytes, ties, floors, and rows that stay what they are when they are coded again."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.reference.common.row_format import dequantize_rows, quantize_rows, round_to_grid
from dsv4_compile.testing import assert_bitwise

GROUP = [1, -0.3, 0.05, 0.7, 0.12, -0.9, 0.33, 0, 0.5, -0.25, 0.6, -0.04, 0.08, 0.2, -0.45, 0.15]


@pytest.mark.parametrize(
    ("amax", "byte"), [(0, 1), (1, 35), (3, 48), (5, 53), (6, 56), (6.25, 56), (2688, 126), (1e9, 126)]
)
def test_scales_of_nvfp4_are_rounded_quotients_and_no_powers_of_two(amax: float, byte: int) -> None:
    data, scale = quantize_rows(torch.tensor([amax, *[0.0] * 15]), "nvfp4")
    assert scale.tolist() == [byte]
    value = float(dequantize_rows(data, scale, "nvfp4")[0])
    assert value == (0.0 if amax == 0 else 2688.0 if amax > 2688 else pytest.approx(amax, rel=0.07))


def test_a_group_of_nvfp4_has_its_published_bytes() -> None:
    data, scale = quantize_rows(torch.tensor(GROUP), "nvfp4")
    assert data.numpy().tobytes().hex(" ") == "b7 61 f1 04 b5 85 21 2d"
    assert scale.tolist() == [35]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (-0.25, 0), (-2.5, -2), (5.01, 6)],
)
@pytest.mark.parametrize("grid", ["nvfp4", "mxfp4"])
def test_ties_of_e2m1_go_to_even_codes(value: float, rounded: float, grid: str) -> None:
    assert round_to_grid(torch.tensor([6.0, value, *[0.0] * 30]), grid)[1] == rounded


@pytest.mark.parametrize(
    ("amax", "byte"), [(0, 105), (1e-4, 105), (1.0, 119), (3.5, 120), (7.0, 121), (7.03125, 122), (448.0, 127)]
)
def test_scales_of_mxfp8_cover_32_channels(amax: float, byte: int) -> None:
    _, scale = quantize_rows(torch.tensor([amax, *[0.0] * 31, *[0.0] * 32]), "mxfp8")
    assert scale.tolist() == [byte, 105]


@pytest.mark.parametrize("grid", layout.GRIDS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_rows_on_a_grid_are_exact_in_bfloat16_and_stay_there(grid: str, size: float) -> None:
    """Decoding and coding again changes nothing, in nvfp4 from scales of 2^-6 on."""
    x = size * torch.randn(50, 64)
    if grid == "nvfp4":
        x = x.clamp(-2688, 2688) if size > 1e-2 else x + 0.5
    once = round_to_grid(x, grid)
    assert_bitwise(once.bfloat16().float(), once)
    assert_bitwise(round_to_grid(once, grid), once)


@pytest.mark.parametrize(
    ("grid", "channels", "bytes_", "page"),
    [("mxfp8", 512, 528, 16896), ("nvfp4", 512, 288, 9216), ("mxfp4", 128, 68, 2304)],
)
def test_rows_have_their_published_bytes(grid: str, channels: int, bytes_: int, page: int) -> None:
    rows = layout.row_layout(grid, channels)
    assert rows.data + rows.scale == bytes_ and rows.page_stride(32) == page


def test_a_page_of_entries_and_keys_has_no_padding() -> None:
    """890 bytes a token: 2.5 entries and 2.5 keys."""
    size = layout.V41_ENTRY_BLOCK
    entry, key = (layout.row_layout(*row).page_stride(size) / size for row in (("nvfp4", 512), ("mxfp4", 128)))
    assert 2.5 * (entry + key) == 890


def test_rows_that_scales_do_not_cover_raise() -> None:
    with pytest.raises(InputError, match="cover 32 channels"):
        layout.row_layout("mxfp8", 48)
    with pytest.raises(InputError, match="E202"):
        layout.row_layout("mxfp6", 64)
