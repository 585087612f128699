"""Comparisons that fail with the first wrong coordinate, not with a matrix.

`assert_bitwise` is for results of defined rounding: indices, lengths, cache bytes, quantised values.
`assert_close` is for sums in any order. It compares infinities and NaN by position before it looks at any
tolerance, since a NaN passes every `>` test and an infinity swallows every difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element passes within `abs` or within `rel` times the expected magnitude; the tensor passes within `cosine`.

    The cosine difference is 1 - 2<a, b> / (<a, a> + <b, b>) over the finite elements, 0 for equal tensors. Unlike an
    element bound it sees a small error that points the same way everywhere.
    """

    abs: float
    rel: float
    cosine: float


TOLERANCES: dict[str, Tolerance] = {
    # Two bfloat16 outputs; the weights of one may have been rounded to bfloat16 too.
    # rel: neighbours are 2^-7 apart at the bottom of a binade; two of those, and 0.5 % since the bound is on a rounded
    #   value. abs: averages of 100 or more unit-variance keys are of size 0.1, so below 1e-3 it is cancellation, not
    #   rounding, that decides the relative error.
    # cosine: a rounding costs half its mean square error over the mean square, (2^-7)^2 / 12 / 2.2 / 2 = 1.1e-6 if
    #   mantissas were log-uniform, 1.4e-6 for normal values; rounded weights cost 0.8e-6. At worst 3.6e-6 together.
    "attention_bfloat16": Tolerance(abs=1e-3, rel=2.01 / 128, cosine=5e-6),
    # Rows of any length, of keys below 5: weights rounded to bfloat16 are off by 2^-9 at most, and with
    # few keys little of that cancels. Simulated in float64, rows of fewer than 150 keys leave the bound above at a few
    # elements in a million, as the kernels do.
    "attention_few_keys": Tolerance(abs=5 * 2.0**-9, rel=2.01 / 128, cosine=1e-5),
    # Prefill in longer rows: one more rounding of the running maximum's rescale.
    "attention_prefill_bfloat16": Tolerance(abs=8e-4, rel=3.01 / 128, cosine=7e-6),
    # float32 throughout: a dot product of 512 terms of unit scale is good to 512 x 2^-24 = 3e-5 at worst and to about
    # sqrt(512) x 2^-24 = 1.4e-6 in practice; the weights inherit it, the outputs are of order one.
    "attention_float32": Tolerance(abs=5e-6, rel=1e-5, cosine=1e-10),
    # Log-sum-exp is float32. Hardware exp2 and log2 are good to 2 ULP and the scores to a few: 8 units of 2^-16 is the
    # worst that both together were seen to do, 1e-6 covers values that cancel to zero.
    "lse": Tolerance(abs=1e-6, rel=8.01 / 65536, cosine=1e-8),
    # With a norm inside, after which queries are rounded or not: numbers of a query are off by 2^-9 at most and by 8e-4
    # as a rule, a score of 512 products by 8e-4 times the size of its key's numbers, and a row of few keys by as much.
    # Five times that, of keys of size 2.
    "lse_normed": Tolerance(abs=8e-3, rel=8.01 / 65536, cosine=1e-6),
    "lse_prefill": Tolerance(abs=1e-6, rel=2.01 / 65536, cosine=1e-8),
}
"""Tolerances of sparse attention by name. A kernel and this package's reference agree within them."""


def assert_bitwise(actual: Tensor, expected: Tensor, *, strides: bool = False, label: str = "tensor") -> None:
    """Fail unless dtype, shape and every byte are equal. NaN equals NaN of the same payload; 0.0 is not -0.0.

    Args:
        actual, expected: any dtype, any device, any strides.
        strides: demand equal strides too.
        label: named in the message.
    """
    _assert_same_kind(actual, expected, label, dtype=True)
    if strides and actual.stride() != expected.stride():
        raise AssertionError(f"{label}: strides {actual.stride()}, expected {expected.stride()}")
    got, want = actual.detach().cpu(), expected.detach().cpu()
    different = (_bytes(got) != _bytes(want)).any(-1)
    if different.any():
        _fail(label, "bytes differ", different, got, want)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    tolerance: str | Tolerance = "attention_bfloat16",
    *,
    label: str = "tensor",
    turned: int = 0,
) -> None:
    """Fail unless +inf, -inf and NaN stand at the same places and every other element is within the tolerance.

    Args:
        actual, expected: floating tensors of one shape; dtypes and devices may differ, so that a bfloat16 result is
            compared with a float64 oracle without rounding the oracle.
        tolerance: a `Tolerance`, or a name in `TOLERANCES`.
        label: named in the message.
        turned: number of last columns that are pairs of neighbours, rounded, rotated and rounded again. Their error is
            relative to the magnitude of their pair (`_turned_limit`).
    """
    _assert_same_kind(actual, expected, label, dtype=False)
    bound = TOLERANCES[tolerance] if isinstance(tolerance, str) else tolerance
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        misplaced = test(got) != test(want)
        if misplaced.any():
            _fail(label, f"{kind} at different places", misplaced.flatten(), got, want)
    finite = torch.isfinite(want)
    got, want = torch.where(finite, got, 0.0), torch.where(finite, want, 0.0)
    error = (got - want).abs()
    limit = (bound.rel * want.abs()).clamp_min(bound.abs)
    if turned:
        limit[..., -turned:] = _turned_limit(want[..., -turned:], bound)
    beyond = error > limit
    if beyond.any():
        worst = f"largest absolute difference {error.max().item():.3e}, abs {bound.abs:.3e}, rel {bound.rel:.3e}"
        _fail(label, f"not close ({worst})", beyond.flatten(), got, want)
    energy = (got * got + want * want).sum()
    cosine = (((got - want) ** 2).sum() / energy).item() if energy > 0 else 0.0
    if cosine > bound.cosine:
        raise AssertionError(f"{label}: cosine difference {cosine:.3e} is above {bound.cosine:.3e}")


def _turned_limit(want: Tensor, bound: Tolerance) -> Tensor:
    """Return the largest error of rotated pairs, if pairs before the rotation are within `bound`.

    A rotation mixes the two errors of a pair: at most their root sum of squares, which is at most that of the two
    bounds, sqrt(2 abs^2 + rel^2 |pair|^2). Rounding again costs both sides half a spacing of the pair's magnitude, and
    `rel` is four such halves.
    """
    size = want.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
    return (2 * bound.abs**2 + (bound.rel * size) ** 2).sqrt() + bound.rel / 4 * size


def _assert_same_kind(actual: Tensor, expected: Tensor, label: str, *, dtype: bool) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{label}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if dtype and actual.dtype is not expected.dtype:
        raise AssertionError(f"{label}: dtype {actual.dtype}, expected {expected.dtype}")


def _bytes(x: Tensor) -> Tensor:
    """uint8 `[numel, itemsize]`."""
    dense = x.clone(memory_format=torch.contiguous_format)  # .contiguous() keeps odd strides of single elements
    return dense.view(-1).view(torch.uint8).view(x.numel(), x.element_size())


def _fail(label: str, what: str, wrong: Tensor, got: Tensor, want: Tensor) -> None:
    """Raise with the first coordinate where `wrong`, a flat mask, is set."""
    count, first = int(wrong.sum()), int(wrong.to(torch.uint8).argmax())
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape))
    raise AssertionError(
        f"{label}: {what} at {count} of {wrong.numel()} elements, first at {coordinate}: "
        f"got {_show(got, coordinate)}, expected {_show(want, coordinate)}"
    )


def _show(x: Tensor, coordinate: tuple[int, ...]) -> str:
    value = x[coordinate]
    hexadecimal = _bytes(value).flatten().flip(0).numpy().tobytes().hex()
    number = value.item() if value.dtype.itemsize > 1 or not value.dtype.is_floating_point else value.float().item()
    return f"{number!r} (0x{hexadecimal})"
