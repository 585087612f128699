"""Schema, check and fake of `torch.ops.dsv4.copy_ragged_to_graph_buffers`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from ...reference.metadata import copy_ragged_to_graph_buffers as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect
from ..common.validate_batch import expect_capacity

OP = "copy_ragged_to_graph_buffers"


def _check(ragged_indices: Tensor, ragged_indptr: Tensor, indices_buffer: Tensor, indptr_buffer: Tensor) -> None:
    expect(ragged_indices, f"{OP}: ragged_indices [N]", INTS)
    expect(ragged_indptr, f"{OP}: ragged_indptr [R + 1]", INTS)
    expect(indices_buffer, f"{OP}: indices_buffer [M]", torch.int32)
    expect(indptr_buffer, f"{OP}: indptr_buffer [Q + 1]", torch.int32)
    if ragged_indptr.shape[0] < 1:
        fail("E201", got="an empty ragged_indptr", rule=f"{OP}: ragged_indptr has R + 1 elements")
    expect_capacity(indptr_buffer, ragged_indptr.shape[0], OP, "indptr_buffer")


def _fake(ragged_indices: Tensor, ragged_indptr: Tensor, indices_buffer: Tensor, indptr_buffer: Tensor) -> None:
    return None


copy_ragged_to_graph_buffers = define(
    "copy_ragged_to_graph_buffers",
    mutates=("indices_buffer", "indptr_buffer"),
    reference=reference.copy_ragged_to_graph_buffers,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.metadata.copy_ragged_to_graph_buffers",
    cost=CostModel(
        lambda T, K: (T * (2 * INT32 * K + 2 * INT32), 0),
    ),
    invariant=EXACT,
)
