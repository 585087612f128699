"""`torch.ops.dsv4.engram_embed`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check, fail
from ...layout import MX_TILE
from ...reference.engram import engram_embed as reference
from ...selection.costs import FLOAT32, INT64, CallSizes, CostModel
from ..common.define import define
from ..common.validate import E4M3, FLOATS, INTS, describe, expect

_OP = "engram_embed"


def _check(rows: Tensor, table: Tensor, scale: Tensor | None = None) -> None:
    expect(rows, f"{_OP}: rows [T, K]", INTS)
    expect(table, f"{_OP}: table [N, C]", (*FLOATS, E4M3))
    if table.dtype is not E4M3:
        check(scale is None, "E201", got=f"{_OP}: scale", rule=f"a table in {table.dtype} has no scales")
        return
    if scale is None:
        fail("E201", got=f"{_OP}: {describe(table)} without scale", rule="an e4m3 table has scales")
    expect(scale, f"{_OP}: scale [N, C / {MX_TILE}]", (torch.uint8, torch.float8_e8m0fnu))
    wanted = [table.shape[0], table.shape[1] // MX_TILE]
    if list(scale.shape) != wanted or table.shape[1] % MX_TILE:
        fail("E201", got=f"{describe(scale)} for {describe(table)}", rule=f"{_OP}: scale is {wanted}")


def _fake(rows: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
    return table.new_empty((rows.shape[0], rows.shape[1] * table.shape[1]), dtype=torch.float32)


def _sizes(call: CallSizes) -> dict[str, int]:
    (rows, columns), scale = call.dims("table"), call.bytes_of("scale")
    return dict(zip(("T", "K"), call.dims("rows"), strict=True)) | {
        "D": columns,
        "row": columns * call.size("table") + scale // max(rows, 1),
    }


engram_embed = define(
    _OP,
    reference=reference.engram_embed,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.engram.engram_embed",
    cost=CostModel(lambda T, K, D, row: (T * K * (INT64 + row + FLOAT32 * D), 0), sizes=_sizes),
)
