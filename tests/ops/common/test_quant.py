from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.reference.common import quant
from dsv4_compile.testing import assert_bitwise, refuse_synchronization
from tests.gemm_orders import by_size
from tests.support import scalar


def all_bfloat16(low: float) -> Tensor:
    """Every finite bfloat16 of at least `low`, as float32, ascending."""
    values = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values >= low]


@pytest.mark.parametrize(
    ("amax", "exponent", "byte"),
    [
        (0.0, -22, 105),
        (1e-4, -22, 105),
        (1e-3, -18, 109),
        (0.5, -9, 118),
        (1.0, -8, 119),
        (3.5, -7, 120),
        (7.0, -6, 121),
        (7.03125, -5, 122),
        (448.0, 0, 127),
        (450.0, 1, 128),
    ],
)
def test_cache_scales_have_their_published_bytes(amax: float, exponent: int, byte: int) -> None:
    tile = torch.tensor([-amax] + [0.0] * 63).bfloat16().float()
    _, got = quant.quantize_tiles(tile, layout.KV_TILE, layout.KV_AMAX_FLOOR)
    assert got.tolist() == [byte]
    assert quant.ue8m0_scale(got).tolist() == [2.0**exponent]


@pytest.mark.parametrize("format_max", [layout.FP8_MAX, layout.E2M1_MAX])
def test_scale_byte_is_exact_for_every_bfloat16(format_max: float) -> None:
    amax = all_bfloat16(layout.MXFP4_AMAX_FLOOR * (format_max / layout.E2M1_MAX))
    want = [scalar.ue8m0_exponent(a, format_max) + layout.UE8M0_BIAS for a in amax.tolist()]
    got = quant.ue8m0_byte(amax, format_max)
    assert got.dtype is torch.int32
    assert got.tolist() == want


@pytest.mark.parametrize("format_max", [layout.FP8_MAX, layout.E2M1_MAX])
def test_scale_byte_is_exact_for_every_float32_of_a_binade(format_max: float) -> None:
    """Only the mantissa decides, so one binade stands for all: amax need not have been rounded to bfloat16."""
    amax = torch.arange(1 << 23, dtype=torch.int32).add_(129 << 23).view(torch.float32)  # [4, 8)
    largest = quant.ue8m0_scale(quant.ue8m0_byte(amax, format_max)).double() * format_max
    assert ((amax <= largest) & (amax > largest / 2)).all()


def test_scale_byte_is_never_the_nan_code() -> None:
    hostile = torch.tensor([torch.inf, torch.nan, 3.4e38])
    assert (quant.ue8m0_byte(hostile, 1.0) <= layout.UE8M0_MAX_BYTE).all()


def test_scale_value_of_every_byte_is_what_torch_decodes() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    assert_bitwise(quant.ue8m0_scale(byte[:255]), byte[:255].view(torch.float8_e8m0fnu).float())
    assert quant.ue8m0_scale(byte[255:]).isnan().all()


def test_e4m3_rounds_and_saturates_as_the_scalar_oracle() -> None:
    magnitude = torch.cat((all_bfloat16(2.0**-14)[::3], torch.rand(2000) * 500))
    x = torch.cat((magnitude, -magnitude, torch.tensor([0.0, -0.0])))
    want = torch.tensor([scalar.e4m3_code(v) for v in x.tolist()], dtype=torch.uint8)
    assert_bitwise(quant.to_e4m3(x).view(torch.uint8), want)


def test_e4m3_ties_go_to_the_even_code() -> None:
    values = [scalar.e4m3_value(code) for code in range(0x7F)]
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    got = quant.to_e4m3(middle).view(torch.uint8).tolist()
    assert got == [code + code % 2 for code in range(0x7E)]


def test_nan_stays_nan_in_e4m3() -> None:
    assert quant.to_e4m3(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize(("tile", "floor"), [(64, layout.KV_AMAX_FLOOR), (128, layout.ACT_AMAX_FLOOR)])
def test_tiles_are_quantised_as_the_scalar_oracle(tile: int, floor: float) -> None:
    x = (torch.randn(6, 2 * tile) * torch.logspace(-9, 3, 6)[:, None]).bfloat16().float()
    x[0, :tile] = 0
    values, byte = quant.quantize_tiles(x, tile, floor)
    for row, got, scales in zip(x.tolist(), values.view(torch.uint8).tolist(), byte.tolist(), strict=True):
        tiles = [scalar.quantize_tile(row[i : i + tile], floor) for i in (0, tile)]
        assert bytes(got) == tiles[0][0] + tiles[1][0]
        assert scales == [tiles[0][1], tiles[1][1]]


def test_an_all_zero_tile_stores_zeros_and_the_floor_scale() -> None:
    values, byte = quant.quantize_tiles(torch.zeros(64), 64, layout.KV_AMAX_FLOOR)
    assert not values.view(torch.uint8).any()
    assert byte.tolist() == [105]


def test_quantised_tiles_come_back_within_half_a_step() -> None:
    x = torch.randn(32, 128) * 10
    values, byte = quant.quantize_tiles(x, 64, layout.KV_AMAX_FLOOR)
    back = quant.dequantize_tiles(values, byte, 64)
    # Three mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale among the subnormals.
    step = torch.maximum(x.abs() * 2**-4, (quant.ue8m0_scale(byte) * 2**-10).repeat_interleave(64, 1))
    assert ((back - x).abs() <= step).all()


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (5.01, 6.0), (7.0, 6.0)],
)
def test_e2m1_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    code = quant.e2m1_code(torch.tensor([value, -value]))
    assert quant.e2m1_value(code).tolist() == [rounded, -rounded]


def test_e2m1_rounds_as_the_scalar_oracle() -> None:
    x = torch.cat((torch.linspace(-7, 7, 4481), torch.randn(500), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])))
    assert quant.e2m1_code(x).tolist() == [scalar.e2m1_code(v) for v in x.tolist()]


def test_nan_saturates_in_e2m1_which_has_none() -> None:
    assert quant.e2m1_code(torch.tensor([torch.nan])).tolist() == [7]


def test_e2m1_codes_have_their_values() -> None:
    got = quant.e2m1_value(torch.arange(16, dtype=torch.uint8))
    assert got.tolist() == [scalar.e2m1_value(code) for code in range(16)]
    assert math.copysign(1, got[8].item()) == -1


def test_mxfp4_packs_the_even_element_into_the_low_nibble() -> None:
    x = torch.zeros(32)
    x[0], x[1] = 6.0, -0.5
    packed, byte = quant.quantize_mxfp4(x)
    assert packed[0].item() == 0x7 | (0x9 << 4)
    assert byte.tolist() == [127]


def test_mxfp4_is_quantised_as_the_scalar_oracle() -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-30, 1e-3, 1.0, 50.0, 0.0])[:, None]
    packed, byte = quant.quantize_mxfp4(x)
    back = quant.dequantize_mxfp4(packed, byte)
    for i, row in enumerate(x.tolist()):
        for tile in range(2):
            elements = row[32 * tile : 32 * tile + 32]
            e = scalar.ue8m0_exponent(max(layout.MXFP4_AMAX_FLOOR, *map(abs, elements)), layout.E2M1_MAX)
            assert byte[i, tile].item() == e + layout.UE8M0_BIAS
            want = [math.ldexp(scalar.e2m1_value(scalar.e2m1_code(math.ldexp(v, -e))), e) for v in elements]
            assert back[i, 32 * tile : 32 * tile + 32].tolist() == want


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_has_the_signs_of_the_sylvester_matrix_and_is_its_own_inverse(n: int) -> None:
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
    torch.testing.assert_close(quant.hadamard(torch.eye(n)), signs * n**-0.5, rtol=1e-6, atol=0)
    x = torch.randn(3, n)
    torch.testing.assert_close(quant.hadamard(quant.hadamard(x)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hadamard_of_a_vector_has_its_bits_whatever_is_transformed_with_it(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 128).to(dtype)
    with by_size():
        batch = quant.hadamard(x)
        for shape in ((0, 128), (1, 128), (2, 128), (4, 1, 128)):
            vectors = x.view(-1, 128)[: math.prod(shape[:-1])].view(shape)
            assert_bitwise(quant.hadamard(vectors), batch.view(-1, 128)[: vectors.numel() // 128].view(shape))
        assert not torch.equal(x[0, :1].float() @ x[1].float().t(), (x[0].float() @ x[1].float().t())[:1])


def test_nothing_waits_for_the_device() -> None:
    x = torch.randn(2, 128)
    with refuse_synchronization():
        quant.dequantize_mxfp4(*quant.quantize_mxfp4(x))
        quant.dequantize_tiles(*quant.quantize_tiles(x, 64, layout.KV_AMAX_FLOOR), 64)
        quant.hadamard(x)
