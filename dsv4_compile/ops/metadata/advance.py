"""Schema, check and fake of `torch.ops.dsv4.advance`."""

from __future__ import annotations

import torch

from ...errors import fail
from ...reference.metadata import advance as reference
from ...reference.metadata.advance import AdvanceArguments
from ...selection.costs import INT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_dim
from ..common.validate_batch import expect_batch, expect_capacity, expect_positive

OP = "advance"


def _check(call: AdvanceArguments) -> None:
    expect_positive(OP, query_len=call.query_len)
    expect_batch(
        OP,
        call.query_start_loc,
        call.seq_lens,
        ("num_new", call.num_new),
        ("reserved", call.reserved),
        ("overflow", call.overflow),
    )
    requests = call.seq_lens.shape[0]
    expect(call.query_start_loc, f"{OP}: query_start_loc [R + 1]", torch.int32)
    expect(call.seq_lens, f"{OP}: seq_lens [R]", torch.int32)
    expect(call.overflow, f"{OP}: overflow [R]", torch.int32)
    expect(call.tokens, f"{OP}: tokens [R, S]", INTS)
    expect_dim(call.tokens.shape[0], requests, f"{OP}: tokens has a row for each request")
    if call.tokens.shape[1] < 1:
        fail("E201", got=f"tokens {list(call.tokens.shape)}", rule=f"{OP}: tokens has a column or more")
    if (call.drafts is None) != (call.query_len == 1):
        fail(
            "E201",
            got=f"query_len={call.query_len} with{'out' if call.drafts is None else ''} drafts",
            rule=f"{OP}: drafts come where query_len is above 1",
        )
    if call.drafts is not None:
        expect(call.drafts, f"{OP}: drafts [R, query_len - 1]", INTS)
        expect_dim(call.drafts.shape[0], requests, f"{OP}: drafts has a row for each request")
        expect_dim(
            call.drafts.shape[1], call.query_len - 1, f"{OP}: drafts has a column for each token behind the first"
        )
    expect(call.input_ids, f"{OP}: input_ids [N]", torch.int64)
    expect_capacity(call.input_ids, requests * call.query_len, OP, "input_ids")


def _fake(call: AdvanceArguments) -> None:
    return None


advance = define(
    "advance",
    mutates=("query_start_loc", "seq_lens", "input_ids", "overflow"),
    reference=reference.advance,
    fake=_fake,
    check=_check,
    arguments=AdvanceArguments,
    kernel="dsv4_compile.kernels.metadata.advance",
    cost=CostModel(
        lambda R: (R * (6 * INT32 + 2 * INT64), 0),
        sizes=lambda call: {"R": call.dims("num_new")[0]},
    ),
    invariant=EXACT,
)
