"""Schemas, checks and fakes of `torch.ops.dsv4.global_topk` and `.global_topk_ragged`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.metadata import global_topk as cpu
from ...reference.metadata import global_topk as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT, Invariance
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_index_rows, expect_positive
from .ragged_from_dense import fake_ragged


def _check(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> None:
    op = "global_topk"
    expect_index_rows(topk_indices, op, "topk_indices", INTS)
    expect(token_to_req, f"{op}: token_to_req [N]", INTS)
    expect(block_table, f"{op}: block_table [R, B]", INTS)
    expect(is_valid_token, f"{op}: is_valid_token [N]", torch.bool)
    expect_positive(op, block_size=block_size)
    expect_rows(token_to_req.shape[0], topk_indices.shape[0], f"{op}: token_to_req")
    expect_rows(is_valid_token.shape[0], topk_indices.shape[0], f"{op}: is_valid_token")


def _fake(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    tokens, width = topk_indices.shape[0], topk_indices.shape[-1]
    return (
        topk_indices.new_empty(tokens, width, dtype=torch.int32),
        topk_indices.new_empty(tokens, dtype=torch.int32),
    )


def _fake_ragged(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = topk_indices.shape[0]
    flat, indptr = fake_ragged(topk_indices, token_to_req)
    return flat, indptr, indptr.new_empty(tokens)


global_topk = define(
    "global_topk",
    reference=reference.global_topk,
    on_cpu=cpu.global_topk,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.metadata.global_topk",
    lowering="dsv4_compile.lowering.metadata.global_topk",
    cost=CostModel(
        lambda T, K: (T * (2 * INT32 * K + INT32), 0),
        sizes=lambda call: call.of_indices("topk_indices"),
    ),
    invariant=Invariance(rows=("topk_indices", "token_to_req", "is_valid_token"), exact=True),
)

global_topk_ragged = define(
    "global_topk_ragged",
    reference=reference.global_topk_ragged,
    fake=_fake_ragged,
    check=_check,
    kernel="dsv4_compile.kernels.metadata.global_topk",
    cost=CostModel(
        lambda T, K: (T * (2 * INT32 * K + 2 * INT32), 0),
        sizes=lambda call: call.of_indices("topk_indices"),
    ),
    invariant=EXACT,
)
