"""Schema, check and fake of `torch.ops.dsv4.batch_metadata`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import fail
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
GROUPS: dict[str, dict[str, torch.dtype]] = {
    "window": {"window_slots": torch.int64, "window_indices": torch.int32, "window_lens": torch.int32},
    "c4": {"c4_slots": torch.int64},
    "c4_state": {"c4_state_slots": torch.int64},
    "indexer": {"indexer_slots": torch.int64},
    "indexer_state": {"indexer_state_slots": torch.int64},
    "c128": {"c128_slots": torch.int64, "c128_indices": torch.int32, "c128_lens": torch.int32},
    "c128_state": {"c128_state_slots": torch.int64},
}
"""The buffers of each group of caches, and their dtypes. They come with the group's block table, or not at all."""
CONTEXT_LENS = ("c4_context_lens", "c128_context_lens")
"""Buffers that follow from positions alone: each may be given or not, whatever tables there are."""
WIDTHS = {"window_indices": "W", "c128_indices": "C"}
ARGUMENTS = BatchMetadataArguments._fields
"""Names of the arguments, in schema order."""


def _check(call: BatchMetadataArguments) -> None:
    arguments: dict[str, Any] = call._asdict()
    expect_batch(OP, arguments["query_start_loc"], arguments["seq_lens"])
    if arguments["slot_mapping"] is not None:
        expect(arguments["slot_mapping"], f"{OP}: slot_mapping [M]", INTS)
    expect_positive(OP, window_block_size=arguments["window_block_size"])
    expect(arguments["positions"], f"{OP}: positions [N]", TOKENS["positions"])
    rows = arguments["positions"].shape[0]
    for name, dtype in TOKENS.items():
        _expect_buffer(name, arguments[name], dtype, rows)
    for name in CONTEXT_LENS:
        if arguments[name] is not None:
            _expect_buffer(name, arguments[name], torch.int32, rows)
    for group, buffers in GROUPS.items():
        table = arguments[f"{group}_block_table"]
        present = [name for name in buffers if arguments[name] is not None]
        if len(present) != (0 if table is None else len(buffers)):
            fail(
                "E201",
                got=f"{OP}: {', '.join([*present, *([] if table is None else [f'{group}_block_table'])])} alone",
                rule=f"{group}_block_table, {', '.join(buffers)} come together",
            )
        if table is not None:
            expect(table, f"{OP}: {group}_block_table [R, B]", INTS)
        for name in present:
            _expect_buffer(name, arguments[name], buffers[name], rows)


def _expect_buffer(name: str, buffer: Tensor, dtype: torch.dtype, rows: int) -> None:
    expect(buffer, f"{OP}: {name} [N, {WIDTHS[name]}]" if name in WIDTHS else f"{OP}: {name} [N]", dtype)
    expect_dim(buffer.shape[0], rows, f"{OP}: {name} has a row for each of positions")


def _fake(call: BatchMetadataArguments) -> None:
    return None


batch_metadata = define(
    "batch_metadata",
    mutates=(
        "positions",
        "token_to_req",
        "is_valid_token",
        "window_slots",
        "window_indices",
        "window_lens",
        "c4_slots",
        "c4_state_slots",
        "indexer_slots",
        "indexer_state_slots",
        "c128_slots",
        "c128_indices",
        "c128_lens",
        "c128_state_slots",
        "c4_context_lens",
        "c128_context_lens",
    ),
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
