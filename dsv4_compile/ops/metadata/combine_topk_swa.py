"""Schemas, check and fakes of `torch.ops.dsv4.combine_topk_swa` and `.combine_topk_swa_ragged`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import INDEX_ALIGN, align_up, cdiv
from ...reference.metadata import combine_topk_swa as reference
from ...reference.metadata.combine_topk_swa import CombineTopkArguments
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect
from ..common.validate_batch import expect_batch, expect_positive, expect_range


def _check(call: CombineTopkArguments) -> None:
    op = "combine_topk_swa"
    expect(call.topk_indices, f"{op}: topk_indices [T, K]", INTS)
    expect_batch(op, call.query_start_loc, call.seq_lens, ("gather_lens", call.gather_lens))
    expect_positive(op, window=call.window, ratio=call.ratio)
    expect_range(op, "topk", call.topk, call.topk_indices.shape[1])
    expect_range(op, "n", call.n, call.m)


def _fake(call: CombineTopkArguments) -> tuple[Tensor, Tensor]:
    tokens, width = call.topk_indices.shape[0], align_up(call.topk + call.window, INDEX_ALIGN)
    return (
        call.topk_indices.new_empty(tokens, width, dtype=torch.int32),
        call.topk_indices.new_empty(tokens, dtype=torch.int32),
    )


def _fake_ragged(call: CombineTopkArguments) -> tuple[Tensor, Tensor, Tensor]:
    tokens = call.topk_indices.shape[0]
    return (
        call.topk_indices.new_empty(tokens * (call.topk + call.window), dtype=torch.int32),
        call.topk_indices.new_empty(tokens + 1, dtype=torch.int32),
        call.topk_indices.new_empty(tokens, dtype=torch.int32),
    )


combine_topk_swa = define(
    "combine_topk_swa",
    reference=reference.combine_topk_swa,
    fake=_fake,
    check=_check,
    arguments=CombineTopkArguments,
    kernel="dsv4_compile.kernels.metadata.combine_topk_swa",
    cost=CostModel(
        lambda T, K, W: (T * INT32 * (K + INDEX_ALIGN * cdiv(K + W, INDEX_ALIGN) + 1), 0),
        sizes=lambda call: call.of_indices("topk_indices"),
    ),
    invariant=EXACT,
)

combine_topk_swa_ragged = define(
    "combine_topk_swa_ragged",
    reference=reference.combine_topk_swa_ragged,
    fake=_fake_ragged,
    check=_check,
    arguments=CombineTopkArguments,
    kernel="dsv4_compile.kernels.metadata.combine_topk_swa",
    cost=CostModel(
        lambda T, K, W: (T * (INT32 * (2 * K + W) + 2 * INT32), 0),
        sizes=lambda call: call.of_indices("topk_indices"),
    ),
    invariant=EXACT,
)
