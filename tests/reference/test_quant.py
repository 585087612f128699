"""Rounding to the small formats, against searches over every representable value."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4_compile.layout import E2M1_MAX, FP8_MAX
from dsv4_compile.reference import quant
from dsv4_compile.testing import refuse_synchronization

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest_e2m1(value: float) -> int:
    """Code of the nearest grid value, ties to the even code, by search."""
    distance = [abs(abs(value) - grid) for grid in E2M1_GRID]
    best = min(distance)
    code = min((i for i, d in enumerate(distance) if d == best), key=lambda i: i % 2)
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def test_e2m1_code_rounds_to_nearest_with_ties_to_even() -> None:
    steps = torch.arange(-64, 65) / 8
    values = torch.cat((steps, torch.nextafter(steps, torch.tensor(torch.inf)), torch.tensor([-0.0, 100.0, -100.0])))
    assert quant.e2m1_code(values).tolist() == [nearest_e2m1(v) for v in values.tolist()]


def test_e2m1_code_saturates_infinities_and_nan() -> None:
    assert quant.e2m1_code(torch.tensor([torch.inf, -torch.inf, torch.nan])).tolist() == [7, 15, 7]


def test_e2m1_value_inverts_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = quant.e2m1_value(codes)
    assert values.dtype is torch.float32
    assert values.tolist() == [*E2M1_GRID, *(-grid for grid in E2M1_GRID)]
    assert torch.equal(quant.e2m1_code(values), codes)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (1e-4, 105),
        (1e-3, 109),
        (0.5, 118),
        (1.0, 119),
        (3.5, 120),
        (7.0, 121),
        (7.03125, 122),
        (448.0, 127),
        (450.0, 128),
    ],
)
def test_ue8m0_byte_of_the_worked_examples(amax: float, byte: int) -> None:
    assert quant.ue8m0_byte(torch.tensor([amax]), FP8_MAX).tolist() == [byte]


@pytest.mark.parametrize("format_max", [FP8_MAX, E2M1_MAX])
def test_ue8m0_byte_is_the_exact_ceiling_for_every_bfloat16(format_max: float) -> None:
    amax = torch.arange(0x3000, 0x4800, dtype=torch.int16).view(torch.bfloat16).float()
    scale = quant.ue8m0_scale(quant.ue8m0_byte(amax, format_max)).double()
    assert bool((amax.double() <= scale * format_max).all())
    assert bool((amax.double() > scale / 2 * format_max).all())


def test_mxfp4_packs_the_even_index_into_the_low_nibble() -> None:
    packed, byte = quant.quantize_mxfp4(torch.tensor([6.0, -1.5] + [0.0] * 30))
    assert packed.tolist() == [0x7 | (0xB << 4)] + [0] * 15
    assert byte.tolist() == [127]
    assert quant.dequantize_mxfp4(packed, byte).tolist() == [6.0, -1.5] + [0.0] * 30


def test_mxfp4_of_zeros_uses_the_smallest_normal_scale() -> None:
    packed, byte = quant.quantize_mxfp4(torch.zeros(32))
    assert packed.tolist() == [0] * 16
    assert byte.tolist() == [1]


def test_hadamard_is_the_sylvester_matrix() -> None:
    matrix = quant.hadamard(torch.eye(8)) * 8**0.5
    expected = [[(-1.0) ** bin(i & j).count("1") for j in range(8)] for i in range(8)]
    assert torch.allclose(matrix, torch.tensor(expected), atol=1e-6)


def test_no_rounding_synchronises() -> None:
    x = torch.randn(2, 64)
    with refuse_synchronization():
        quant.dequantize_mxfp4(*quant.quantize_mxfp4(x))
        quant.dequantize_tiles(*quant.quantize_tiles(x, 32, 1e-4), 32)
        quant.hadamard(x)
