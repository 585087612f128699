"""Schema, check and fake of `torch.ops.dsv4.prefill_gather_lens`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import prefill_gather_lens as reference
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate_batch import expect_batch, expect_positive, expect_range


def _check(query_start_loc: Tensor, seq_lens: Tensor, num_decodes: int, window: int) -> None:
    op = "prefill_gather_lens"
    expect_batch(op, query_start_loc, seq_lens)
    expect_positive(op, window=window)
    expect_range(op, "num_decodes", num_decodes, seq_lens.shape[0])


def _fake(query_start_loc: Tensor, seq_lens: Tensor, num_decodes: int, window: int) -> Tensor:
    return seq_lens.new_empty(seq_lens.shape[0] - num_decodes, dtype=torch.int32)


prefill_gather_lens = define(
    "prefill_gather_lens",
    reference=reference.prefill_gather_lens,
    fake=_fake,
    check=_check,
    cost=CostModel(
        lambda R: (3 * R * INT32, 0),
        sizes=lambda call: {"R": call.dims("seq_lens")[0]},
    ),
    invariant=EXACT,
)
