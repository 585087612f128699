"""`torch.ops.dsv4.advance`; what it computes is in reference/advance.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from ...reference.metadata import advance as reference
from ..common.define import define
from ..common.validate import INTS, expect, expect_dim
from ..common.validate_batch import expect_batch, expect_capacity, expect_positive

OP = "advance"


def _check(
    num_new: Tensor,
    tokens: Tensor,
    drafts: Tensor | None,
    reserved: Tensor,
    query_len: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    input_ids: Tensor,
    overflow: Tensor,
) -> None:
    expect_positive(OP, query_len=query_len)
    expect_batch(OP, query_start_loc, seq_lens, ("num_new", num_new), ("reserved", reserved), ("overflow", overflow))
    requests = seq_lens.shape[0]
    expect(query_start_loc, f"{OP}: query_start_loc [R + 1]", torch.int32)
    expect(seq_lens, f"{OP}: seq_lens [R]", torch.int32)
    expect(overflow, f"{OP}: overflow [R]", torch.int32)
    expect(tokens, f"{OP}: tokens [R, S]", INTS)
    expect_dim(tokens.shape[0], requests, f"{OP}: tokens has a row for each request")
    if tokens.shape[1] < 1:
        fail("E201", got=f"tokens {list(tokens.shape)}", rule=f"{OP}: tokens has a column or more")
    if (drafts is None) != (query_len == 1):
        fail("E201", got=f"query_len={query_len}, {drafts=}", rule=f"{OP}: drafts come where query_len is above 1")
    if drafts is not None:
        expect(drafts, f"{OP}: drafts [R, query_len - 1]", INTS)
        expect_dim(drafts.shape[0], requests, f"{OP}: drafts has a row for each request")
        expect_dim(drafts.shape[1], query_len - 1, f"{OP}: drafts has a column for each token behind the first")
    expect(input_ids, f"{OP}: input_ids [N]", torch.int64)
    expect_capacity(input_ids, requests * query_len, OP, "input_ids")


def _fake(
    num_new: Tensor,
    tokens: Tensor,
    drafts: Tensor | None,
    reserved: Tensor,
    query_len: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    input_ids: Tensor,
    overflow: Tensor,
) -> None:
    return None


advance = define(
    "advance(Tensor num_new, Tensor tokens, Tensor? drafts, Tensor reserved, int query_len, "
    "Tensor(a!) query_start_loc, Tensor(b!) seq_lens, Tensor(c!) input_ids, Tensor(d!) overflow) -> ()",
    reference=reference.advance,
    fake=_fake,
    check=_check,
)
