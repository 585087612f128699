"""Schema, check and fake of `torch.ops.dsv4.compressed_slot_mapping`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import compressed_slot_mapping as reference
from ...selection.costs import INT64, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect
from ..common.validate_batch import expect_batch, expect_capacity, expect_positive


def _check(
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    ratio: int,
    out: Tensor,
) -> None:
    op = "compressed_slot_mapping"
    expect(slot_mapping, f"{op}: slot_mapping [T]", INTS)
    expect_batch(op, query_start_loc, seq_lens)
    expect(block_table, f"{op}: block_table [R, B]", INTS)
    expect_positive(op, block_size=block_size, ratio=ratio)
    expect(out, f"{op}: out [N]", torch.int64)
    expect_capacity(out, slot_mapping.shape[0], op, "out")


def _fake(
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    ratio: int,
    out: Tensor,
) -> None:
    return None


compressed_slot_mapping = define(
    "compressed_slot_mapping",
    mutates=("out",),
    reference=reference.compressed_slot_mapping,
    fake=_fake,
    check=_check,
    lowering="dsv4_compile.lowering.metadata.compressed_slot_mapping",
    cost=CostModel(
        lambda T: (2 * T * INT64, 0),
        sizes=lambda call: {"T": call.dims("slot_mapping")[0]},
    ),
    invariant=EXACT,
)
