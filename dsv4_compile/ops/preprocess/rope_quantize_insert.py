"""`torch.ops.dsv4.rope_quantize_insert`."""

from __future__ import annotations

from torch import Tensor

from ...reference.preprocess import rope_quantize_insert as reference
from ...selection.costs import CostModel, angles, inserted
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_grid, expect_rope_table, expect_row_cache

_OP = "rope_quantize_insert"


def _check(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    grid: str = "",
) -> None:
    expect(x, f"{_OP}: x [T, D]", FLOATS)
    expect(slots, f"{_OP}: slots [T]", INTS)
    expect(positions, f"{_OP}: positions [T]", INTS)
    expect_dim(slots.shape[0], x.shape[0], f"{_OP}: slots and x have the same tokens")
    expect_dim(positions.shape[0], x.shape[0], f"{_OP}: positions and x have the same tokens")
    expect_rope_table(cos_sin_cache, _OP, x.shape[1])
    expect_row_cache(cache, _OP, "cache", cache_format, block_size, x.shape[1])
    expect_grid(_OP, grid, cache_format, x.shape[1])


def _fake(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    grid: str = "",
) -> None:
    return None


rope_quantize_insert = define(
    _OP,
    mutates=("cache",),
    reference=reference.rope_quantize_insert,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.preprocess.rope_quantize_insert",
    cost=CostModel(
        lambda T, D, rope, row, e=2: (T * (angles(rope) + e * D + inserted(row)), 0),
        sizes=lambda call: call.of_rows("x") | call.rope | call.row(call.dims("x")[1], "x"),
    ),
)
