"""Schema, check and fake of `torch.ops.dsv4.c128a_topk_metadata`."""

from __future__ import annotations

import torch

from ...reference.metadata import c128a_topk_metadata as reference
from ...reference.metadata.c128a_topk_metadata import C128aTopkArguments
from ...selection.costs import INT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_capacity, expect_positive, expect_range


def _check(call: C128aTopkArguments) -> None:
    op = "c128a_topk_metadata"
    expect(call.positions, f"{op}: positions [T]", torch.int64)
    expect(call.token_to_req, f"{op}: token_to_req [T]", INTS)
    expect(call.slot_mapping, f"{op}: slot_mapping [T]", INTS)
    expect(call.block_table, f"{op}: block_table [R, B]", INTS)
    expect_positive(op, block_size=call.block_size, ratio=call.ratio)
    expect(call.global_decode, f"{op}: global_decode [N, C]", torch.int32)
    expect(call.decode_lens, f"{op}: decode_lens [N]", torch.int32)
    expect(call.prefill, f"{op}: prefill [N, C]", torch.int32)
    tokens = call.positions.shape[0]
    expect_range(op, "num_decode_tokens", call.num_decode_tokens, tokens)
    expect_rows(call.token_to_req.shape[0], call.num_decode_tokens, f"{op}: token_to_req")
    expect_rows(call.slot_mapping.shape[0], call.num_decode_tokens, f"{op}: slot_mapping")
    expect_capacity(call.global_decode, call.num_decode_tokens, op, "global_decode")
    expect_capacity(call.decode_lens, call.num_decode_tokens, op, "decode_lens")
    expect_capacity(call.prefill, tokens - call.num_decode_tokens, op, "prefill")


def _fake(call: C128aTopkArguments) -> None:
    return None


c128a_topk_metadata = define(
    "c128a_topk_metadata",
    mutates=("global_decode", "decode_lens", "prefill"),
    reference=reference.c128a_topk_metadata,
    fake=_fake,
    check=_check,
    arguments=C128aTopkArguments,
    cost=CostModel(
        lambda T, K: (T * (3 * INT64 + INT32 * (K + 1)), 0),
    ),
    invariant=EXACT,
)
