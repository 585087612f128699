from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.linear.grouped_linear import grouped_linear
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided


def problem(tokens: int, groups: int, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, groups, size).to(dtype), torch.randn(groups * rows, size).to(dtype)


def exact(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """float64, a group at a time, and the sum of magnitudes that bounds the error of any order of summation."""
    groups = x.shape[1]
    parts = weight.double().chunk(groups)
    z = torch.cat([x[:, g].double() @ parts[g].t() for g in range(groups)], dim=1)
    return z, torch.cat([x[:, g].double().abs() @ parts[g].abs().t() for g in range(groups)], dim=1)


@pytest.mark.parametrize(("tokens", "groups", "rows", "size"), [(5, 2, 24, 96), (1, 3, 40, 33), (4, 1, 7, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_group_has_its_own_matrix(tokens: int, groups: int, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = problem(tokens, groups, rows, size, dtype)
    got = grouped_linear(x, weight, groups)
    assert (got.dtype, got.shape) == (dtype, (tokens, groups * rows))
    assert got.is_contiguous()
    want, magnitude = exact(x, weight)
    half_ulp = torch.exp2(want.abs().clamp_min(1e-30).log2().floor()) * torch.finfo(dtype).eps / 2
    assert ((got.double() - want).abs() <= half_ulp + size * 2**-24 * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_float32_result_is_not_rounded(dtype: torch.dtype) -> None:
    x, weight = problem(5, 2, 24, 96, dtype)
    got = grouped_linear(x, weight, 2, True)
    assert (got.dtype, got.shape) == (torch.float32, (5, 48))
    want, magnitude = exact(x, weight)
    assert ((got.double() - want).abs() <= 96 * 2**-24 * magnitude).all()


def test_heads_laid_end_to_end_are_the_same_input() -> None:
    x, weight = problem(4, 3, 20, 64, torch.bfloat16)
    want = grouped_linear(x, weight, 3)
    assert_bitwise(grouped_linear(x.flatten(1), weight, 3), want)
    assert_bitwise(grouped_linear(padded(x), padded(weight), 3), want)


def test_rows_and_groups_do_not_influence_each_other() -> None:
    x, weight = problem(4, 3, 20, 64, torch.float32)
    want = grouped_linear(x, weight, 3).view(4, 3, 20)
    x[2, 1] = torch.nan
    got = grouped_linear(x, weight, 3).view(4, 3, 20)
    assert got[2, 1].isnan().all()
    got[2, 1] = want[2, 1]
    assert_bitwise(got, want)


def test_op_keeps_its_promises() -> None:
    x, weight = problem(4, 3, 20, 64, torch.bfloat16)
    check_op(
        grouped_linear,
        [
            (x, weight, 3),
            (x.flatten(1)[:1], weight, 3),
            (x, weight, 3, True),
            (strided(x.float()), padded(weight.float()), 3),
            (x.transpose(0, 1).contiguous().transpose(0, 1), weight, 3),
            (x[:0], weight, 3),
        ],
    )


def test_one_graph_serves_every_token_count() -> None:
    weight = torch.randn(60, 64)

    def step(x: Tensor) -> Tensor:
        return grouped_linear(x * 2, weight, 3) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 7, 2):
            x = torch.randn(tokens, 3 * 64)
            torch._dynamo.mark_dynamic(x, 0)
            assert_bitwise(compiled(x), step(x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 191)}, "holds the K of weight for every group"),
        ({"x": torch.zeros(4, 2, 64)}, "a row for every group"),
        ({"x": torch.zeros(4, 3, 65)}, "the last dim of x is the K of weight"),
        ({"x": torch.zeros(192)}, r"x \[T, G \* K\] or \[T, G, K\]"),
        ({"x": torch.zeros(4, 192).bfloat16()}, "has the dtype of weight"),
        ({"weight": torch.zeros(60, 64).double()}, "weight"),
        ({"weight": torch.zeros(61, 64)}, "divide into groups"),
        ({"groups": 0}, "divide into groups"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(4, 192), "weight": torch.zeros(60, 64), "groups": 3}
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        grouped_linear(*{**arguments, **changes}.values())
