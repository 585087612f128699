"""Schema, check and fake of `indexer_topk_slots`; reference/indexer/ defines what it computes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...cpu.indexer.indexer_logits import indexer_logits_topk
from ...reference.indexer.indexer_topk_slots import TopkSlotsArguments
from ...reference.indexer.indexer_topk_slots import indexer_topk_slots as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_positive
from .indexer_logits import check_topk, query_bytes, scored_sizes
from .indexer_q_rope_quant import query_costs

_OP = "indexer_topk_slots"


def _check(call: TopkSlotsArguments) -> None:
    check_topk(call.selection(), _OP)
    expect(call.extra_block_table, f"{_OP}: extra_block_table [R, B]", INTS)
    expect(call.is_valid_token, f"{_OP}: is_valid_token [T]", torch.bool)
    expect_rows(call.is_valid_token.shape[0], call.q.shape[0], f"{_OP}: is_valid_token")
    expect_positive(_OP, extra_block_size=call.extra_block_size)


def _fake(call: TopkSlotsArguments) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape[0], call.topk, dtype=torch.int32), q.new_empty(q.shape[0], dtype=torch.int32)


indexer_topk_slots = define(
    "indexer_topk_slots",
    arguments=TopkSlotsArguments,
    reference=reference,
    on_cpu=partial(reference, select=indexer_logits_topk),
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.indexer.indexer_topk_slots",
    cost=CostModel(
        lambda T, H, D, K, L, C, row: (C * row + T * (query_bytes(H, D) + INT32 * (K + 1)), 2 * T * H * D * L),
        sizes=scored_sizes,
        added=query_costs,
        operands="e4m3",
    ),
    invariant=Invariance(
        rows=("q", "q_scale", "weights", "token_to_req", "context_lens", "is_valid_token"),
        on_cpu=AS_IT_IS,
        kernel=AS_IT_IS,
    ),
)
