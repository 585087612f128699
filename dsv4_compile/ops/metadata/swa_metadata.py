"""Schema, check and fake of `torch.ops.dsv4.swa_metadata`."""

from __future__ import annotations

import torch

from ...reference.metadata import swa_metadata as reference
from ...reference.metadata.swa_metadata import SwaMetadataArguments
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_dim
from ..common.validate_batch import expect_batch, expect_capacity, expect_index_rows, expect_positive, expect_range


def _check(call: SwaMetadataArguments) -> None:
    op = "swa_metadata"
    expect_batch(op, call.query_start_loc, call.seq_lens)
    expect(call.block_table, f"{op}: block_table [R, B]", INTS)
    expect(call.slot_mapping, f"{op}: slot_mapping [T]", INTS)
    expect_positive(op, block_size=call.block_size, window=call.window)
    expect(call.token_to_req, f"{op}: token_to_req [N]", torch.int32)
    expect(call.is_valid_token, f"{op}: is_valid_token [N]", torch.bool)
    expect_index_rows(call.swa_indices, op, "swa_indices")
    expect_dim(call.swa_indices.shape[-1], call.window, f"{op}: swa_indices has a column for each token of the window")
    expect(call.swa_lens, f"{op}: swa_lens [N]", torch.int32)
    tokens = call.slot_mapping.shape[0]
    expect_range(op, "num_decode_tokens", call.num_decode_tokens, tokens)
    expect_capacity(call.token_to_req, tokens, op, "token_to_req")
    expect_capacity(call.is_valid_token, tokens, op, "is_valid_token")
    expect_capacity(call.swa_indices, call.num_decode_tokens, op, "swa_indices")
    expect_capacity(call.swa_lens, call.num_decode_tokens, op, "swa_lens")


def _fake(call: SwaMetadataArguments) -> None:
    return None


swa_metadata = define(
    "swa_metadata",
    mutates=("token_to_req", "is_valid_token", "swa_indices", "swa_lens"),
    reference=reference.swa_metadata,
    fake=_fake,
    check=_check,
    arguments=SwaMetadataArguments,
    cost=CostModel(
        lambda T, W: (T * (INT32 * (W + 2) + 1), 0),
        sizes=lambda call: {"T": call.dims("slot_mapping")[0], "W": call.arguments["window"]},
    ),
    invariant=EXACT,
)
