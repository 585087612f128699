"""`torch.ops.dsv4.c128a_topk_metadata`; what it computes is in reference/c128a_topk_metadata.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import c128a_topk_metadata as reference
from ..common.define import define
from ..common.validate import INTS, expect, expect_rows
from ..common.validate_batch import expect_capacity, expect_positive, expect_range


def _check(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    ratio: int,
    num_decode_tokens: int,
    global_decode: Tensor,
    decode_lens: Tensor,
    prefill: Tensor,
) -> None:
    op = "c128a_topk_metadata"
    expect(positions, f"{op}: positions [T]", torch.int64)
    expect(token_to_req, f"{op}: token_to_req [T]", INTS)
    expect(slot_mapping, f"{op}: slot_mapping [T]", INTS)
    expect(block_table, f"{op}: block_table [R, B]", INTS)
    expect_positive(op, block_size=block_size, ratio=ratio)
    expect(global_decode, f"{op}: global_decode [N, C]", torch.int32)
    expect(decode_lens, f"{op}: decode_lens [N]", torch.int32)
    expect(prefill, f"{op}: prefill [N, C]", torch.int32)
    tokens = positions.shape[0]
    expect_range(op, "num_decode_tokens", num_decode_tokens, tokens)
    expect_rows(token_to_req.shape[0], num_decode_tokens, f"{op}: token_to_req")
    expect_rows(slot_mapping.shape[0], num_decode_tokens, f"{op}: slot_mapping")
    expect_capacity(global_decode, num_decode_tokens, op, "global_decode")
    expect_capacity(decode_lens, num_decode_tokens, op, "decode_lens")
    expect_capacity(prefill, tokens - num_decode_tokens, op, "prefill")


def _fake(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    ratio: int,
    num_decode_tokens: int,
    global_decode: Tensor,
    decode_lens: Tensor,
    prefill: Tensor,
) -> None:
    return None


c128a_topk_metadata = define(
    "c128a_topk_metadata(Tensor positions, Tensor token_to_req, Tensor block_table, Tensor slot_mapping, "
    "int block_size, int ratio, int num_decode_tokens, "
    "Tensor(a!) global_decode, Tensor(b!) decode_lens, Tensor(c!) prefill) -> ()",
    reference=reference.c128a_topk_metadata,
    fake=_fake,
    check=_check,
)
