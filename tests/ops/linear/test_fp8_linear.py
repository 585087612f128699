from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.linear.fp8_linear import fp8_linear
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.support import scalar

E8M0 = torch.float8_e8m0fnu


def weights(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """e4m3 weight and its power-of-two scales, every block's different from its neighbours'."""
    blocks = -(-rows // 128), -(-size // 128)
    exponent = torch.arange(math.prod(blocks)).view(blocks) % 7 - 9
    return (torch.randn(rows, size) * 30).to(torch.float8_e4m3fn), 2.0 ** exponent.float()


def dequantized(x: Tensor) -> Tensor:
    """float64 of the fp8 activations that the scalar oracle makes of `x` `[T, K]`, strip by strip."""
    out = []
    for row in x.float().tolist():
        values: list[float] = []
        for first in range(0, len(row), 128):
            strip = row[first : first + 128]
            data, byte = scalar.quantize_tile(strip, 1e-10)
            values += [math.ldexp(scalar.e4m3_value(code), byte - 127) for code in data]
        out.append(values)
    return torch.tensor(out, dtype=torch.float64).view(x.shape)


def exact(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """float64 product of exact operands, block by block, and the sum of magnitudes that bounds a float32 sum."""
    w = weight.double().clone()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j].item()
    return x.double() @ w.t(), x.double().abs() @ w.abs().t()


def assert_rounded_once(got: Tensor, want: Tensor, magnitude: Tensor, size: int) -> None:
    bits = 8 if got.dtype is torch.bfloat16 else 24
    half_ulp = torch.exp2(want.abs().clamp_min(1e-30).log2().floor() - bits)
    assert ((got.double() - want).abs() <= half_ulp + size * 2**-24 * magnitude).all()


SHAPES = pytest.mark.parametrize(("rows", "size"), [(128, 128), (256, 384), (130, 200), (5, 100), (1, 129)], ids=str)


@SHAPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_are_quantised_in_strips_and_the_product_rounded_once(rows: int, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(4, size) * torch.logspace(-12, 3, 4)[:, None]).to(dtype)
    x[0] = 0
    weight, scale = weights(rows, size)
    got = fp8_linear(x, weight, scale)
    assert got.dtype is dtype
    assert_rounded_once(got, *exact(dequantized(x), weight, scale), size)


@SHAPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_quantisation_the_input_is_exact(rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, size).to(dtype)
    weight, scale = weights(rows, size)
    assert_rounded_once(fp8_linear(x, weight, scale, False), *exact(x, weight, scale), size)


def test_the_last_partial_strip_has_a_scale_of_its_own() -> None:
    """Element 128 is alone in its strip: it keeps its precision next to a strip a million times larger."""
    x = torch.full((1, 129), 1e6)
    x[0, 128] = 1.0
    weight = torch.zeros(1, 129).to(torch.float8_e4m3fn)
    weight[0, 128] = 1.0
    assert fp8_linear(x, weight, torch.ones(1, 2)).item() == 1.0


def test_every_form_of_the_weight_scale_gives_the_same_result() -> None:
    x, (weight, scale) = torch.randn(3, 200).bfloat16(), weights(130, 200)
    want = fp8_linear(x, weight, scale)
    assert_bitwise(fp8_linear(x, weight, scale.to(E8M0)), want)
    assert_bitwise(fp8_linear(x, weight, scale.to(E8M0).view(torch.uint8)), want)


def test_scales_of_float32_need_not_be_powers_of_two() -> None:
    x, (weight, scale) = torch.randn(3, 200).bfloat16(), weights(130, 200)
    scale = scale * torch.rand_like(scale)
    assert_rounded_once(fp8_linear(x, weight, scale, False), *exact(x, weight, scale), 2 * 200)


def test_rows_do_not_influence_each_other() -> None:
    x, (weight, scale) = torch.randn(4, 200), weights(130, 200)
    want = fp8_linear(x, weight, scale)
    x[2] = torch.nan
    got = fp8_linear(x, weight, scale)
    assert_bitwise(got[[0, 1, 3]], want[[0, 1, 3]])
    assert got[2].isnan().all()


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_dims_are_kept(leading: tuple[int, ...]) -> None:
    x, (weight, scale) = torch.randn(*leading, 200).bfloat16(), weights(130, 200)
    got = fp8_linear(x, weight, scale)
    assert got.shape == (*leading, 130)
    assert got.is_contiguous()
    for row, want in zip(got.view(-1, 130), x.view(-1, 200) if x.numel() else [], strict=True):
        torch.testing.assert_close(row, fp8_linear(want, weight, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [True, False])
def test_another_layer_of_the_same_input_follows_unrounded_and_unquantised(quantize: bool, dtype: torch.dtype) -> None:
    x, (weight, scale), other = torch.randn(2, 3, 200).to(dtype), weights(130, 200), torch.randn(7, 200).to(dtype)
    both = fp8_linear(x, weight, scale, quantize, other)
    assert both.dtype is torch.float32 and both.is_contiguous()
    first, second = both.split((130, 7), dim=-1)
    assert_bitwise(first.to(dtype), fp8_linear(x, weight, scale, quantize))
    want = x.double() @ other.double().t()
    assert ((second - want).abs() <= 200 * 2**-24 * (x.double().abs() @ other.double().abs().t())).all()


def test_op_keeps_its_promises() -> None:
    x, (weight, scale) = torch.randn(2, 3, 200).bfloat16(), weights(130, 200)
    other = torch.randn(9, 200)
    check_op(
        fp8_linear,
        [
            (x, weight, scale),
            (x[0], weight, scale.to(E8M0), False),
            (strided(x.float()), padded(weight), padded(scale).to(E8M0).view(torch.uint8)),
            (x.transpose(0, 1).float(), weight, scale, False),
            (x[0, 0], weight, scale),
            (x[:1, 0], weight, scale),
            (x[0].new_empty((0, 200)), weight, scale),
            (x, weight, scale, True, other.bfloat16()),
            (strided(x.float()), weight, scale, False, padded(other)),
            (x[0].new_empty((0, 200)), weight, scale, True, other.bfloat16()),
        ],
    )


def test_one_graph_serves_every_token_count() -> None:
    weight, scale = weights(130, 200)

    def step(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return fp8_linear(x * 2, weight, scale.view(E8M0)) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    byte = scale.to(E8M0).view(torch.uint8)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 7, 2):
            x = torch.randn(tokens, 200).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            assert_bitwise(compiled(x, weight, byte), step(x, weight, byte))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 199)}, "the K of weight"),
        ({"x": torch.zeros(3, 200).double()}, r"x \[..., K\]"),
        ({"weight": torch.zeros(130, 200)}, "float8_e4m3fn"),
        ({"weight_scale": torch.ones(1, 2)}, "one scale per block"),
        ({"weight_scale": torch.ones(2, 2).int()}, "weight_scale"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Tensor], message: str) -> None:
    weight, scale = weights(130, 200)
    arguments = {"x": torch.zeros(3, 200), "weight": weight, "weight_scale": scale}
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        fp8_linear(*{**arguments, **changes}.values())
