"""Argument checks of metadata and index ops: batches, index rows, buffers and sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from .validate import INTS, describe, expect, expect_dim


def expect_batch(op: str, query_start_loc: Tensor, seq_lens: Tensor, *per_request: tuple[str, Tensor]) -> None:
    """Raise E201 unless these are `query_start_loc` int `[R + 1]`, `seq_lens` int `[R]` and more ints `[R]`."""
    expect(query_start_loc, f"{op}: query_start_loc [R + 1]", INTS)
    for name, value in (("seq_lens", seq_lens), *per_request):
        expect(value, f"{op}: {name} [R]", INTS)
        expect_dim(
            value.shape[0] + 1, query_start_loc.shape[0], f"{op}: query_start_loc has one element more than {name}"
        )


def expect_index_rows(
    value: Tensor, op: str, name: str, dtypes: torch.dtype | tuple[torch.dtype, ...] = torch.int32
) -> None:
    """Raise E201 unless `value` holds one row per token: `[T, K]`, or `[T, 1, K]` as attention kernels take it."""
    if value.dim() == 3:
        expect_dim(value.shape[1], 1, f"{op}: {name} is [T, K] or [T, 1, K]")
        value = value.squeeze(1)
    expect(value, f"{op}: {name} [T, K]", dtypes)


def expect_capacity(buffer: Tensor, rows: int, op: str, name: str) -> None:
    """Raise E204 unless `buffer` has room for `rows` rows."""
    if buffer.shape[0] < rows:
        fail("E204", got=f"{op}: {name} {describe(buffer)} for {rows} rows", fix="allocate it for the largest batch")


def expect_positive(op: str, **sizes: int) -> None:
    """Raise E201 unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            fail("E201", got=f"{name}={size}", rule=f"{op}: {name} is at least 1")


def expect_range(op: str, name: str, value: int, upper: int) -> None:
    """Raise E201 unless `0 <= value <= upper`."""
    if value < 0 or value > upper:
        fail("E201", got=f"{name}={value}", rule=f"{op}: {name} is between 0 and {upper}")
