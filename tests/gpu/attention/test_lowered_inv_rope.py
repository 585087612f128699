"""IR of `inv_rope` and `inv_rope_fp8_quant` on a GPU against the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, ROPE_DIM
from tests.gpu.lowered import assert_equals_reference, launches

HEADS, GROUPS = 64, 8
SIZES = (7, 66, 513, 2049)
"""None is divisible by 4: torch compiles those sizes separately, because their scales have no padding."""


def inputs(tokens: int, dim: int = HEAD_DIM, rope: int = ROPE_DIM, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return heads followed by padding heads, with rows of zeros, large and small values, and positions outside."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    o = torch.randn(tokens, HEADS + 8, dim, device="cuda", generator=generator).to(dtype)
    o[1::7], o[2::7], o[3::7] = 0, o[2::7] * 1e-20, o[3::7] * 1e15
    o[:, HEADS:] = torch.nan
    positions = torch.randint(0, 1000, (tokens,), device="cuda", generator=generator)
    positions[::5], positions[3::9] = -1, 10**9
    angles = torch.rand(1000, rope // 2, device="cuda", generator=generator) * 6.28
    return [o, positions, torch.cat((angles.cos(), angles.sin()), 1)]


def rotate(op: Any, o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return op(o[:, :HEADS], positions, table)


def quantize(op: Any, o: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return op(o, positions, table, GROUPS, HEADS // GROUPS)


def pack(op: Any, o: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return op(o, positions, table, GROUPS, HEADS // GROUPS, True)


def moderate(tokens: int) -> list[Tensor]:
    """Return `inputs` without the large values: rotations that cancel leave an error of their size."""
    o, positions, table = inputs(tokens)
    o[3::7] *= 1e-15
    return [o, positions, table]


@pytest.mark.parametrize("sizes", [SIZES, (1,), (0,)])
def test_rotated_values_are_neighbours_of_the_reference_at_most(sizes: tuple[int, ...]) -> None:
    assert_equals_reference("inv_rope", rotate, moderate, sizes, dynamic=(0, 1))


@pytest.mark.parametrize("sizes", [SIZES, (8, 64), (1,), (0,)])
def test_values_and_scales_are_those_of_the_reference(sizes: tuple[int, ...]) -> None:
    assert_equals_reference("inv_rope_fp8_quant", quantize, inputs, sizes, dynamic=(0, 1))


def test_packed_scales_are_those_of_the_reference() -> None:
    assert_equals_reference("inv_rope_fp8_quant", pack, inputs, (7, 513), dynamic=(0, 1))


def test_small_float32_heads() -> None:
    def small(tokens: int) -> list[Tensor]:
        return inputs(tokens, 32, 16, torch.float32)

    assert_equals_reference("inv_rope_fp8_quant", quantize, small, (7, 90), dynamic=(0, 1))


@pytest.mark.parametrize("tokens", [1, 250])
def test_one_launch_and_no_copy(tokens: int) -> None:
    assert len(launches("inv_rope", rotate, inputs(tokens))) == 1
    assert len(launches("inv_rope_fp8_quant", quantize, inputs(tokens))) == 1
    assert len(launches("inv_rope_fp8_quant", pack, inputs(tokens))) == 2
