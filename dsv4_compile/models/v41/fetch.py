"""Rows of an engram's table, fetched at the beginning of a step on a side stream if it is in host memory.

The rows of a step follow from token ids alone. A kernel on a side stream reads those of a table in host memory over the
bus while the layers before the engram run; `take` waits for them. On a CPU the same ops run one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...modules.side_stream import on_side_stream, side_stream


class TableRows(NamedTuple):
    """Rows of a table that a step reads.

    Attributes:
        numbers: int64 `[T, K]`, those that other ranks have outside the table.
        values: float32 `[T, K * C]` on their way from host memory; None for a table on the device.
    """

    numbers: Tensor
    values: Tensor | None


@torch.library.custom_op("dsv4_stream::fetch", mutates_args=())
def fetch(rows: Tensor, table: Tensor, scale: Tensor | None) -> Tensor:
    """Run `engram_embed` on the side stream. Call `take` before anything reads the result."""
    with on_side_stream(rows.device):
        out: Tensor = torch.ops.dsv4.engram_embed(rows, table, scale)
        return out


@fetch.register_fake
def _(rows: Tensor, table: Tensor, scale: Tensor | None) -> Tensor:
    return rows.new_empty((rows.shape[0], rows.shape[1] * table.shape[1]), dtype=torch.float32)


@torch.library.custom_op("dsv4_stream::take", mutates_args=())
def take(values: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Wait for the side stream, and return a copy of the values that `fetch` gave for `rows`, in a dtype.

    It takes the rows so that a compiler does not reuse their memory before.
    """
    if values.is_cuda:
        torch.cuda.current_stream(values.device).wait_stream(side_stream(values.device))
    return values.to(dtype, copy=True)


@take.register_fake
def _(values: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)
