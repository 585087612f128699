"""Schema, check and fake of `torch.ops.dsv4.ragged_from_dense`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import ragged_from_dense as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_index_rows


def _check(indices: Tensor, lens: Tensor) -> None:
    op = "ragged_from_dense"
    expect_index_rows(indices, op, "indices")
    expect(lens, f"{op}: lens [T]", INTS)
    expect_rows(lens.shape[0], indices.shape[0], f"{op}: lens")


def fake_ragged(indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty `flat` int32 `[T * W]` and `indptr` int32 `[T + 1]` for rows `indices` `[T, W]`."""
    tokens, width = indices.shape[0], indices.shape[-1]
    return (
        indices.new_empty(tokens * width, dtype=torch.int32),
        indices.new_empty(tokens + 1, dtype=torch.int32),
    )


ragged_from_dense = define(
    "ragged_from_dense",
    reference=reference.ragged_from_dense,
    fake=fake_ragged,
    check=_check,
    kernel="dsv4_compile.kernels.metadata.ragged_from_dense",
    cost=CostModel(
        lambda T, K: (T * (2 * INT32 * K + 2 * INT32), 0),
        sizes=lambda call: call.of_indices("indices"),
    ),
    invariant=EXACT,
)
