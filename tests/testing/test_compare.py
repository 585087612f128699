from __future__ import annotations

import pytest
import torch

from dsv4_compile.testing import TOLERANCES, Tolerance, assert_bitwise, assert_close

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_bitwise_accepts_equal_tensors_of_any_dtype_and_stride(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    assert_bitwise(x, x.clone())
    assert_bitwise(x.repeat(1, 2)[:, : x.shape[-1]] if x.dim() else x, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_names_the_first_wrong_coordinate_and_both_values(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 4).to(dtype)
    y = x.clone()
    y[1, 0, 2] = 1
    y[1, 2, 3] = 1
    zero, one = (
        v.item() if dtype.itemsize > 1 or dtype in (torch.bool, torch.uint8) else v.float().item()
        for v in (x[0, 0, 0], y[1, 0, 2])
    )
    with pytest.raises(AssertionError) as failure:
        assert_bitwise(y, x, label="rows")
    for words in ("rows: bytes differ at 2 of 24", "(1, 0, 2)", f"got {one!r}", f"expected {zero!r}"):
        assert words in str(failure.value)


def test_bitwise_tells_zeros_and_nan_payloads_apart() -> None:
    assert_bitwise(torch.tensor([NAN, -INF]), torch.tensor([NAN, -INF]))
    with pytest.raises(AssertionError, match="0x80000000"):
        assert_bitwise(torch.tensor([-0.0]), torch.tensor([0.0]))
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_bitwise(other, torch.tensor([NAN]))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(2), torch.zeros(2, 1), "shape"),
        (torch.zeros(1), torch.zeros(2), "shape"),
        (torch.zeros(2).int(), torch.zeros(2).long(), "dtype"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3), "strides"),
    ],
)
def test_bitwise_refuses_another_kind_of_tensor(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_bitwise(actual, expected, strides=True)


def test_strides_matter_only_when_asked_for() -> None:
    assert_bitwise(torch.zeros(3, 2).t(), torch.zeros(2, 3))


LOOSE = Tolerance(abs=1e9, rel=1e9, cosine=1e9)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, NAN], [1.0, 2.0], "NaN at different places"),
        ([1.0, 2.0], [1.0, NAN], "NaN at different places"),
        ([INF, 2.0], [1.0, 2.0], r"\+inf at different places"),
        ([-INF, 2.0], [INF, 2.0], r"\+inf at different places"),
        ([1.0, 2.0], [-INF, 2.0], "-inf at different places"),
    ],
)
def test_anomalies_fail_before_any_tolerance(actual: list[float], expected: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(torch.tensor(actual), torch.tensor(expected), LOOSE)


def test_matching_anomalies_do_not_hide_other_errors() -> None:
    expected = torch.tensor([NAN, INF, -INF, 1.0])
    assert_close(expected.clone(), expected)
    with pytest.raises(AssertionError, match=r"first at \(3,\): got 1.5"):
        assert_close(torch.tensor([NAN, INF, -INF, 1.5]), expected)


def test_an_element_passes_by_either_bound_but_not_by_their_sum() -> None:
    bound = Tolerance(abs=0.1, rel=0.01, cosine=1.0)
    assert_close(torch.tensor([0.09, 100.9]), torch.tensor([0.0, 100.0]), bound)
    with pytest.raises(AssertionError, match=r"\(1,\)"):
        assert_close(torch.tensor([0.09, 101.05]), torch.tensor([0.0, 100.0]), bound)


def test_a_common_scale_error_is_seen_by_the_cosine_alone() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    with pytest.raises(AssertionError, match="cosine"):
        assert_close(x * 1.012, x, "attention_bfloat16")


def test_bfloat16_is_compared_with_an_unrounded_oracle() -> None:
    x = torch.randn(4, 512, dtype=torch.float64)
    assert_close(x.bfloat16(), x, "attention_bfloat16")
    with pytest.raises(AssertionError):
        assert_close(x.bfloat16(), x, "attention_float32")


def test_rotated_columns_are_held_to_the_size_of_their_pairs() -> None:
    """Pairs of size 0.1 with a tolerance of error in both elements, rotated until one is nearly zero."""
    pair = torch.tensor([0.08, 0.06], dtype=torch.float64)
    off = pair * (1 + 2 / 128)

    def turn(x: torch.Tensor) -> torch.Tensor:
        cos, sin = 0.6, -0.8
        return torch.stack((x[0] * cos + x[1] * sin, x[0] * -sin + x[1] * cos))

    plain = torch.tensor([0.5, 0.5], dtype=torch.float64)
    want, got = (torch.cat((plain, turn(x))) for x in (pair, torch.stack((off[0], pair[1]))))
    loose = Tolerance(abs=1e-4, rel=2.01 / 128, cosine=1.0)
    with pytest.raises(AssertionError, match="at 1 of 4 elements"):
        assert_close(got, want, loose)
    assert_close(got, want, loose, turned=2)
    with pytest.raises(AssertionError, match=r"first at \(0,\)"):
        assert_close(got + torch.tensor([0.01, 0, 0, 0]), want, loose, turned=2)
    with pytest.raises(AssertionError, match=r"first at \(2,\)"):
        assert_close(got + torch.tensor([0, 0, 0.002, 0]), want, loose, turned=2)


@pytest.mark.parametrize("turned", [2, 64])
def test_what_is_rounded_rotated_and_rounded_again_stays_within_the_bound(turned: int) -> None:
    """Neighbouring bfloat16 values, as two kernels may give them, rotated by every angle."""
    x = torch.randn(4000, turned) * torch.logspace(-3, 0, 4000)[:, None]
    angle = 6.28 * torch.rand(4000, turned // 2, dtype=torch.float64)
    near = (x * (1 + 2.0**-8)).bfloat16()

    def rotated(rounded: torch.Tensor) -> torch.Tensor:
        even, odd = rounded.double().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (even * angle.cos() + odd * angle.sin(), odd * angle.cos() - even * angle.sin())
        return torch.stack(pairs, dim=-1).flatten(-2).bfloat16()

    assert_close(rotated(near), rotated(x.bfloat16()), Tolerance(abs=1e-4, rel=2.01 / 128, cosine=1.0), turned=turned)


def test_empty_tensors_are_close() -> None:
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3))


def test_the_attention_tolerances_are_those_that_are_published() -> None:
    assert TOLERANCES["attention_bfloat16"] == Tolerance(1e-3, 2.01 / 128, 5e-6)
    assert (TOLERANCES["lse"].abs, TOLERANCES["lse"].rel) == (1e-6, 8.01 / 65536)
