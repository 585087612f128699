"""Check of the sampling arguments of each request."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.validate import expect, expect_dim

NUMBERS = 4
"""Columns of `numbers`: temperature, top-k, top-p, and one for ops that take a uniform number."""


def expect_requests(op: str, requests: int, numbers: Tensor, seeds: Tensor, positions: Tensor) -> None:
    """Raise E201 unless `numbers` is float64 `[R, 4]`, `seeds` and `positions` int64 `[R]`."""
    expect(numbers, f"{op}: numbers [R, 4]", torch.float64)
    expect_dim(numbers.shape[1], NUMBERS, f"{op}: numbers has four columns")
    for name, value in (("seeds", seeds), ("positions", positions)):
        expect(value, f"{op}: {name} [R]", torch.int64)
        expect_dim(value.shape[0], requests, f"{op}: {name} has one element for each request")
    expect_dim(numbers.shape[0], requests, f"{op}: numbers has a row for each request")
