"""`mx_linear`: blocks of 32x32, inputs in 32 columns, and the same in a compiled graph."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.row_format import round_to_grid
from dsv4_compile.selection.decisions import collect
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

linear = torch.ops.dsv4.mx_linear


def test_each_block_of_32_by_32_has_its_scale() -> None:
    x, weight, scale = op_samples("mx_linear")[0]
    matrix = weight.double()
    for row in range(80):
        for column in range(96):
            matrix[row, column] *= 2.0 ** (int(scale[row // 32, column // 32]) - 127)
    rounded = round_to_grid(x.float(), "mxfp8").double()
    for quantize, operand in ((True, rounded), (False, x.double())):
        got = linear(x, weight, scale, quantize).double()
        torch.testing.assert_close(got, operand @ matrix.t(), rtol=2.0**-8, atol=1e-3)
    assert not torch.equal(linear(x, weight, scale), linear(x, weight, scale, False))


def test_scales_of_inputs_follow_32_columns() -> None:
    """A large value in the first 32 columns rounds nothing in the others."""
    x = torch.full((1, 64), 1 + 2.0**-3)
    x[0, 0] = 448.0
    weight = torch.eye(64).to(torch.float8_e4m3fn)
    got = linear(x, weight, torch.full((2, 2), 127, dtype=torch.uint8))
    assert got[0, 40] == x[0, 40] and got[0, 0] == 448.0
    x[0, 1] = 448 * 2.0**-19
    assert linear(x, weight, torch.full((2, 2), 127, dtype=torch.uint8))[0, 1] == 0


def test_forms_of_scales_are_equal() -> None:
    x, weight, scale = op_samples("mx_linear")[0]
    want = linear(x, weight, scale)
    for form in (scale.view(torch.float8_e8m0fnu), torch.exp2(scale.float() - 127)):
        assert torch.equal(linear(x, weight, form), want)


def test_op_keeps_its_promises() -> None:
    x, weight, scale = op_samples("mx_linear")[0]
    check_op(OPS["mx_linear"], [*op_samples("mx_linear"), (x[:1], weight, scale)])


def test_compiled_op_is_the_eager_one() -> None:
    _, weight, scale = op_samples("mx_linear")[0]
    compiled = torch.compile(
        lambda x: linear(x + 1, weight, scale) * 2,
        backend="dsv4",
        fullgraph=True,
        dynamic=True,
        options={"dsv4.impl": "ir"},
    )
    with torch.no_grad(), collect() as decisions:
        for tokens in (5, 3):
            x = torch.randn(tokens, 96)
            torch.testing.assert_close(compiled(x), linear(x + 1, weight, scale) * 2, rtol=1e-3, atol=1e-3)
    assert [(decision.op, decision.impl) for decision in decisions] == [("mx_linear", "ir")]


def test_wrong_arguments_raise() -> None:
    x, weight, scale = op_samples("mx_linear")[0]
    with pytest.raises(InputError, match="one scale per block"):
        linear(x, weight, scale[:1, :1])
    with pytest.raises(InputError, match="multiple of 32"):
        linear(x[:, :40], weight[:, :40], scale[:, :2])
