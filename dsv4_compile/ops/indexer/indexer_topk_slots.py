"""`torch.ops.dsv4.indexer_topk_slots`; what it computes is in reference/indexer_topk_slots.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.indexer.indexer_topk_slots import indexer_topk_slots as reference
from ..common.define import define
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_positive
from .indexer_logits import check_selection


def _check(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
    main_block_table: Tensor,
    is_valid_token: Tensor,
    main_block_size: int,
) -> None:
    op = "indexer_topk_slots"
    check_selection(
        op, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format, topk
    )
    expect(main_block_table, f"{op}: main_block_table [R, B]", INTS)
    expect(is_valid_token, f"{op}: is_valid_token [T]", torch.bool)
    expect_rows(is_valid_token.shape[0], q.shape[0], f"{op}: is_valid_token")
    expect_positive(op, main_block_size=main_block_size)


def _fake(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
    main_block_table: Tensor,
    is_valid_token: Tensor,
    main_block_size: int,
) -> tuple[Tensor, Tensor]:
    tokens = q.shape[0]
    return q.new_empty(tokens, topk, dtype=torch.int32), q.new_empty(tokens, dtype=torch.int32)


indexer_topk_slots = define(
    "indexer_topk_slots(Tensor q, Tensor q_scale, Tensor weights, Tensor k_cache, Tensor block_table, "
    "Tensor token_to_req, Tensor context_lens, int block_size, str cache_format, int topk, "
    "Tensor main_block_table, Tensor is_valid_token, int main_block_size) -> (Tensor, Tensor)",
    reference=reference,
    fake=_fake,
    check=_check,
)
