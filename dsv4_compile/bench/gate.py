"""Compares the results of an implementation with the reference's, before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.common.arguments import tensors_in

NEIGHBOUR = {torch.bfloat16: 1.01 / 128, torch.float16: 1.01 / 1024, torch.float32: 1e-5}
"""Relative distance to the next value: sums in a different order may round to a neighbour."""
CANCELLED = 1e-5
"""Absolute error of a rotation of values of order one if its two terms cancel."""
FLIPPED_SHARE = 1e-5
"""Share of quantised values that may be neighbours: a fused multiply-add rounds once, not twice."""
CHUNK = 1 << 26
"""Elements compared at a time, which bounds the memory of a comparison."""


def outputs(call: Callable[..., Any], args: Sequence[Any], written: Sequence[int]) -> list[Tensor]:
    """Return the results of `call`, then the arguments it has written."""
    result = call(*args)
    returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return [*returned, *tensors_in(args[i] for i in written)]


def disagreement(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why `got` disagrees with the reference's results `want`, or ""."""
    if len(got) != len(want):
        return f"result has {len(got)} tensors, the reference gives {len(want)}"
    for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
        kinds = [(x.dtype, tuple(x.shape), x.stride()) for x in (actual, expected)]
        if kinds[0] != kinds[1]:
            return f"result {index} is {kinds[0]}, the reference gives {kinds[1]}"
        wrong = _count_wrong(actual, expected)
        allowed = 0 if expected.dtype in NEIGHBOUR else 2 + FLIPPED_SHARE * expected.numel()
        if wrong > allowed:
            return f"result {index}: {wrong} of {expected.numel()} elements are wrong"
    return ""


def _count_wrong(got: Tensor, want: Tensor) -> int:
    if want.numel() == 0:
        return 0
    rows = max(1, CHUNK // max(1, want[0].numel()))
    # Summed on the device and read back once.
    return int(sum(_wrong(a, b).sum() for a, b in zip(got.split(rows), want.split(rows), strict=True)))


def _wrong(got: Tensor, want: Tensor) -> Tensor:
    if want.dtype not in NEIGHBOUR:
        bits = torch.uint8 if want.element_size() == 1 else want.dtype
        return got.view(bits) != want.view(bits)
    expected = want.float()
    # Negated, so that NaN is wrong.
    return ~((got.float() - expected).abs() <= NEIGHBOUR[want.dtype] * expected.abs() + CANCELLED)
