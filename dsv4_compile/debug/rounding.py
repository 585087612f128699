"""How far two forms of one step may be apart by rounding, and where two tensors differ most.

A distance is relative: of floats |a - b| / (|a| + rms(a)), so that a wrong element counts in a large tensor and one
that cancelled to nothing does not. Of other dtypes it is 1 for elements that differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
    torch.float8_e4m3fn: 2.0**-2,
}
"""Distance that one op may add, by dtype: two roundings, and of float32 sums in a different order."""
_GROWTH = 4.0
"""Times an error that earlier ops made by rounding that a later op may make of it."""
_MOST = 0.5
"""Distance that is never rounding."""
_EXCHANGED = 0.02
"""Share of integers or quantised bytes that may differ where earlier floats differ by rounding: near ties."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Largest distance of two tensors, the index where it is, and both values there; `share` of elements differ."""

    largest: float
    limit: float
    index: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    share: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether it is more than rounding."""
        return self.largest > self.limit


def distance(got: Tensor, want: Tensor, before: float) -> Distance:
    """Return how far `got` is from `want`, tensors of one shape.

    Args:
        got, want: any dtype; of two dtypes the coarser one's rounding counts.
        before: largest distance of earlier results, which is rounding.
    """
    if want.numel() == 0:
        return Distance(0.0, 0.0)
    floats = got.is_floating_point() and want.is_floating_point()
    if not floats:
        wrong = got != want
        share = float(wrong.double().mean())
        limit = 1.0 if before > 0 and share <= _EXCHANGED else 0.0
        return _at(wrong.double(), limit, got, want, share)
    a, b = got.double(), want.double()
    size = b.abs()
    rms = torch.where(b.isfinite(), b, 0.0).square().mean().sqrt()
    # Infinities and NaN must be at the same places, the former of one sign.
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, ((a - b).abs() / (size + rms)).nan_to_num(torch.inf, torch.inf))
    rounding = max(_ROUNDING.get(got.dtype, 2e-5), _ROUNDING.get(want.dtype, 2e-5))
    limit = min(_MOST, rounding + _GROWTH * before)
    return _at(far, limit, got, want, float((~same).double().mean()))


def _at(far: Tensor, limit: float, got: Tensor, want: Tensor, share: float) -> Distance:
    largest = float(far.max())
    flat = int(far.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), far.shape)) if far.dim() else ()
    return Distance(largest, limit, index, str(got[index].item()), str(want[index].item()), share)
