from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.inv_rope import inv_rope_fp8_quant
from dsv4_compile.ops.linear.fp8_grouped_einsum import fp8_grouped_einsum, fp8_grouped_einsum_quant
from dsv4_compile.ops.linear.fp8_linear import fp8_linear
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.ops.linear.test_fp8_grouped_einsum import E8M0, e4m3, powers, problem
from tests.support import scalar


def scalar_quantised(z: Tensor) -> tuple[Tensor, Tensor]:
    """The scalar oracle's e4m3 codes and scales of `z` `[T, K]`, strip by strip."""
    codes, scales = [], []
    for row in z.float().tolist():
        strips = [scalar.quantize_tile(row[first : first + 128], 1e-10) for first in range(0, len(row), 128)]
        codes.append([code for data, _ in strips for code in data])
        scales.append([2.0 ** (byte - 127) for _, byte in strips])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales)


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "size"),
    [
        pytest.param(5, 2, 128, 256, id="a strip is a group"),
        pytest.param(1, 3, 256, 200, id="one row"),
        pytest.param(4, 1, 384, 128, id="one group"),
    ],
)
def test_it_is_the_product_rounded_and_then_quantised_strip_by_strip(
    tokens: int, groups: int, rows: int, size: int
) -> None:
    args = problem(tokens, groups, rows, size)
    # A group that is much smaller than its neighbour keeps its precision.
    args[1][:, 0] *= 2.0**-9
    values, scale = fp8_grouped_einsum_quant(*args)
    codes, scales = scalar_quantised(fp8_grouped_einsum(*args).flatten(1))
    assert_bitwise(values.view(torch.uint8), codes[:, None])
    assert_bitwise(scale, scales[:, None])


def test_rows_of_zeros_and_of_nan_are_those_of_the_two_ops() -> None:
    a, a_scale, b, b_scale = problem(4, 2, 128, 256)
    a[1] = 0
    a[2, 1, 7] = torch.nan
    a_scale[3, 0, 1] = torch.nan
    values, scale = fp8_grouped_einsum_quant(a, a_scale, b, b_scale)
    z = fp8_grouped_einsum(a, a_scale, b, b_scale).flatten(1)
    assert z[2, 128:].isnan().all() and z[3, :128].isnan().all()
    # An identity multiplies without a sum: what fp8_linear makes of z are the quantised values times their scales.
    eye = torch.eye(256).to(torch.float8_e4m3fn)
    got = values[:, 0].float() * scale[:, 0].repeat_interleave(128, 1)
    for strip in (slice(0, 128), slice(128, 256)):
        want = fp8_linear(z[:, strip], eye[strip, strip], torch.ones(1, 1))
        assert_bitwise(got[:, strip].bfloat16(), want)
    assert not values[1].float().any() and scale[2, 0, 1] == 2.0**127 and scale[2, 0, 0] < 1e9


def test_the_next_product_takes_it_as_it_is() -> None:
    """Sums of whole numbers, which no order of summation rounds."""
    a, b = (torch.randint(-2, 3, shape).to(torch.float8_e4m3fn) for shape in ((6, 2, 256), (256, 256)))
    weight, weight_scale = torch.randint(-1, 2, (130, 256)).to(torch.float8_e4m3fn), powers(2, 2)
    args = a, torch.ones(6, 2, 2), b, torch.ones(2, 2)
    values, scale = fp8_grouped_einsum_quant(*args)
    assert values.is_contiguous() and scale.stride() == (1, 12, 6)
    got = fp8_grouped_einsum(values, scale, weight, weight_scale).squeeze(1)
    assert_bitwise(got, fp8_linear(fp8_grouped_einsum(*args).flatten(1), weight, weight_scale))


def test_every_form_of_the_scales_gives_the_same_result() -> None:
    o, positions, table = torch.randn(5, 8, 64).bfloat16(), torch.arange(5), torch.randn(9, 16)
    _, _, b, b_scale = problem(1, 2, 128, 256)
    want = fp8_grouped_einsum_quant(*inv_rope_fp8_quant(o, positions, table, 2, 4), b, b_scale)
    packed = inv_rope_fp8_quant(o, positions, table, 2, 4, True)
    for form in (b_scale, b_scale.to(E8M0), b_scale.to(E8M0).view(torch.uint8)):
        for got, expected in zip(fp8_grouped_einsum_quant(*packed, b, form), want, strict=True):
            assert_bitwise(got, expected, strides=True)


def test_op_keeps_its_promises() -> None:
    a, a_scale, b, b_scale = problem(5, 2, 128, 256)
    packed = inv_rope_fp8_quant(torch.randn(5, 8, 64), torch.arange(5), torch.randn(9, 16), 2, 4, True)
    check_op(
        fp8_grouped_einsum_quant,
        [
            (a, a_scale, b, b_scale),
            (*packed, b, b_scale.to(E8M0)),
            (strided(a), strided(a_scale), padded(b), padded(b_scale)),
            (a[:1], a_scale[:1], b, b_scale),
            (a[:0], a_scale[:0], b, b_scale),
            (a, a_scale, b[:0], b_scale[:0]),
        ],
    )


def test_one_graph_projects_every_token_count() -> None:
    _, _, b, b_scale = problem(1, 2, 128, 256)
    weight, weight_scale, table = e4m3(130, 256), powers(2, 2), torch.randn(9, 16)

    def step(o: Tensor, positions: Tensor, b: Tensor, weight: Tensor) -> Any:
        values, scale = fp8_grouped_einsum_quant(*inv_rope_fp8_quant(o, positions, table, 2, 4), b, b_scale)
        return fp8_grouped_einsum(values, scale, weight, weight_scale).squeeze(1) * 2

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 2, 8):
            o, positions = torch.randn(tokens, 8, 64).bfloat16(), torch.randint(0, 9, (tokens,))
            torch._dynamo.mark_dynamic(o, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            assert_bitwise(compiled(o, positions, b, weight), step(o, positions, b, weight), strides=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.zeros(4, 2, 256)}, r"fp8_grouped_einsum_quant: a \[T, G, K\]"),
        ({"a_scale": torch.ones(4, 2, 3)}, "one scale per strip of 128"),
        ({"b": e4m3(192, 256)}, "fill whole strips of 128.*groups of 96 rows"),
        ({"b": e4m3(257, 256), "b_scale": torch.ones(3, 2)}, "divide into groups"),
        ({"b_scale": torch.ones(3, 2)}, "one scale per block"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Tensor], message: str) -> None:
    arguments = dict(zip(("a", "a_scale", "b", "b_scale"), problem(4, 2, 128, 256), strict=True))
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        fp8_grouped_einsum_quant(*{**arguments, **changes}.values())
