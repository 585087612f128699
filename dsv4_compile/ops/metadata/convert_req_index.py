"""Schema, check and fake of `torch.ops.dsv4.convert_req_index`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import convert_req_index as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_positive


def _check(req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, compact: bool = False) -> None:
    op = "convert_req_index"
    expect(req_id, f"{op}: req_id [N]", INTS)
    expect(block_table, f"{op}: block_table [R, B]", INTS)
    expect(token_indices, f"{op}: token_indices [T, K]", INTS)
    expect_positive(op, block_size=block_size)
    expect_rows(req_id.shape[0], token_indices.shape[0], f"{op}: req_id")


def _fake(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, compact: bool = False
) -> tuple[Tensor, Tensor]:
    tokens, width = token_indices.shape
    return (
        token_indices.new_empty(tokens, width, dtype=torch.int32),
        token_indices.new_empty(tokens, dtype=torch.int32),
    )


convert_req_index = define(
    "convert_req_index",
    reference=reference.convert_req_index,
    fake=_fake,
    check=_check,
    cost=CostModel(
        lambda T, K: (T * (2 * INT32 * K + 2 * INT32), 0),
        sizes=lambda call: call.of_indices("token_indices"),
    ),
    invariant=EXACT,
)
