"""The Triton functions of grids against the reference: every code, every border between codes, hostile values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.device import grid_format
from dsv4_compile.reference.common import quant, row_format
from dsv4_compile.testing import assert_bitwise
from tests.support.bounds import checked

pytestmark = pytest.mark.interpreted
QUANTIZERS: dict[str, Any] = {
    "mxfp8": grid_format.quantize_mxfp8,
    "nvfp4": grid_format.quantize_nvfp4,
    "mxfp4": grid_format.quantize_mxfp4,
}


@triton.jit
def quantize_kernel(p_data, p_scale, p_x, QUANTIZE: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, M)[:, None]
    data, scale = QUANTIZE(tl.load(p_x + row * D + tl.arange(0, D)[None, :]))
    tl.store(p_data + row * data.shape[1] + tl.arange(0, data.shape[1])[None, :], data)
    tl.store(p_scale + row * scale.shape[1] + tl.arange(0, scale.shape[1])[None, :], scale)


@triton.jit
def e4m3_kernel(p_out, p_code):
    i = tl.arange(0, 256)
    tl.store(p_out + i, grid_format.e4m3_value(tl.load(p_code + i)))


def quantized(x: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    rows, channels = x.shape
    page = layout.row_layout(grid, channels)
    data, scale = torch.empty(rows, page.data, dtype=torch.uint8), torch.empty(rows, page.scale, dtype=torch.uint8)
    with checked(mutated=("p_data", "p_scale")):
        quantize_kernel[(1,)](data, scale, x, QUANTIZERS[grid], rows, channels)
    return data, scale


def borders(grid: str) -> Tensor:
    """Values on, just below and just above each border of a tile's codes, for many scales, of both signs."""
    tile = layout.grid_tile(grid)
    midpoints = torch.tensor(quant.E2M1_MIDPOINTS)
    largest = layout.FP8_MAX if grid == "mxfp8" else layout.E2M1_MAX
    if grid == "mxfp8":
        values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        midpoints = (values[1:] + values[:-1]) / 2
    around = torch.cat((midpoints, midpoints.nextafter(torch.tensor(0.0)), midpoints.nextafter(torch.tensor(math.inf))))
    rows = around[torch.randint(len(around), (32, 4 * tile))] * (torch.randint(2, (32, 4 * tile)) * 2 - 1)
    rows[:, ::tile] = largest
    scales = 2.0 ** torch.arange(-140.0, 116, 8)
    if grid == "nvfp4":
        scales = torch.arange(8, 16).repeat(4) * 2.0 ** (torch.arange(32) % 13 - 9)
    return rows * scales[:, None]


@pytest.mark.parametrize("grid", layout.GRIDS)
def test_borders_between_codes_go_to_the_even_one(grid: str) -> None:
    x = borders(grid)
    for got, want in zip(quantized(x, grid), row_format.quantize_rows(x, grid), strict=True):
        assert_bitwise(got, want)


@pytest.mark.parametrize("grid", layout.GRIDS)
def test_random_rows_of_any_size(grid: str) -> None:
    x = torch.randn(64, 64) * 10.0 ** torch.linspace(-12, 12, 64)[:, None]
    x[3], x[5, ::7], x[6] = 0, math.inf, -0.0
    for got, want in zip(quantized(x, grid), row_format.quantize_rows(x, grid), strict=True):
        assert_bitwise(got, want)


@pytest.mark.parametrize("grid", layout.GRIDS)
def test_a_nan_spoils_its_own_tile_alone(grid: str) -> None:
    x = torch.randn(2, 128)
    x[0, 40] = math.nan
    got, want = quantized(x, grid), row_format.quantize_rows(x, grid)
    assert_bitwise(got[1], want[1])
    values = row_format.dequantize_rows(*got, grid)
    torch.testing.assert_close(values, row_format.dequantize_rows(*want, grid), rtol=0, atol=0, equal_nan=True)
    assert not values[1].isnan().any()


def test_scales_of_nvfp4_are_those_of_the_specification() -> None:
    largest = torch.tensor([0, 1, 3, 5, 6, 6.25, 2688])
    x = torch.zeros(8, 16)
    x[:7, 3] = largest
    assert quantized(x, "nvfp4")[1][:7, 0].tolist() == [1, 35, 48, 53, 56, 56, 126]


def test_every_e4m3_code_has_its_value() -> None:
    code, values = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    with checked(mutated=("p_out",)):
        e4m3_kernel[(1,)](values, code)
    torch.testing.assert_close(values, code.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
