"""Schema, check and fake of `torch.ops.dsv4.batch_metadata`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import check
from ...reference.metadata import batch_metadata as reference
from ...reference.metadata.batch_metadata import BatchMetadataArguments
from ...selection.costs import INT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_dim
from ..common.validate_batch import expect_batch, expect_positive

OP = "batch_metadata"
TOKENS: dict[str, torch.dtype] = {
    "positions": torch.int64,
    "token_to_req": torch.int32,
    "is_valid_token": torch.bool,
}
"""The buffers that every call fills, and their dtypes."""
ARGUMENTS = BatchMetadataArguments._fields
"""Names of the arguments, in schema order."""
WRITTEN = (*TOKENS, "slots", "indices", "lens", "context_lens")


def _check(call: BatchMetadataArguments) -> None:
    expect_batch(OP, call.query_start_loc, call.seq_lens)
    if call.slot_mapping is not None:
        expect(call.slot_mapping, f"{OP}: slot_mapping [M]", INTS)
    expect(call.positions, f"{OP}: positions [N]", TOKENS["positions"])
    rows = call.positions.shape[0]
    for name, dtype in TOKENS.items():
        _expect_buffer(f"{name} [N]", getattr(call, name), dtype, rows)
    _expect_lists(call, "block_tables", "row_tokens", "page_rows", "slots")
    _expect_lists(call, "listed", "indices", "lens")
    _expect_lists(call, "ratios", "context_lens")
    for i, table in enumerate(call.block_tables):
        expect(table, f"{OP}: block_tables[{i}] [R, B]", INTS)
        expect_positive(OP, **{f"row_tokens[{i}]": call.row_tokens[i], f"page_rows[{i}]": call.page_rows[i]})
    expect_positive(OP, **{f"ratios[{i}]": ratio for i, ratio in enumerate(call.ratios)})
    outside = [group for group in call.listed if not 0 <= group < len(call.block_tables)]
    rule = f"{OP}: listed has places in block_tables, of {len(call.block_tables)}"
    check(not outside, "E201", got=f"listed={list(call.listed)}", rule=rule)
    _expect_buffers("slots {} [N]", call.slots, torch.int64, rows)
    _expect_buffers("indices {} [N, C]", call.indices, torch.int32, rows)
    _expect_buffers("lens {} [N]", call.lens, torch.int32, rows)
    _expect_buffers("context_lens {} [N]", call.context_lens, torch.int32, rows)


def _expect_lists(call: BatchMetadataArguments, *names: str) -> None:
    """Raise E201 unless these arguments are lists of one length."""
    lengths = {name: len(getattr(call, name)) for name in names}
    got = ", ".join(f"{length} {name}" for name, length in lengths.items())
    check(len({*lengths.values()}) == 1, "E201", got=f"{OP}: {got}", rule=f"{', '.join(names)} have one length")


def _expect_buffers(what: str, buffers: Sequence[Tensor], dtype: torch.dtype, rows: int) -> None:
    for i, buffer in enumerate(buffers):
        _expect_buffer(what.format(i), buffer, dtype, rows)


def _expect_buffer(what: str, buffer: Tensor, dtype: torch.dtype, rows: int) -> None:
    expect(buffer, f"{OP}: {what}", dtype)
    expect_dim(buffer.shape[0], rows, f"{OP}: {what} has a row for each of positions")


def _fake(call: BatchMetadataArguments) -> None:
    return None


batch_metadata = define(
    "batch_metadata",
    mutates=WRITTEN,
    reference=reference.batch_metadata,
    fake=_fake,
    check=_check,
    arguments=BatchMetadataArguments,
    kernel="dsv4_compile.kernels.metadata.batch_metadata",
    cost=CostModel(
        lambda T, K, W: (T * (8 * INT64 + 5 * INT32 + 1 + INT32 * (W + K)), 0),
    ),
    invariant=EXACT,
)
