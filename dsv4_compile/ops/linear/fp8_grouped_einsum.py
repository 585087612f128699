"""`torch.ops.dsv4.fp8_grouped_einsum`; defined in reference/fp8_grouped_einsum.py.

`torch.ops.dsv4.fp8_grouped_einsum_quant`; defined in reference/fp8_grouped_einsum_quant.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from ...layout import ACT_TILE, SCALES_PER_WORD, cdiv
from ...reference.common.block_scale import new_rows
from ...reference.linear import fp8_grouped_einsum as reference
from ...selection.costs import FLOAT32, FP8, CostModel, act_tiles, weight_tiles
from ..common.define import define
from ..common.invariance import ALONE, PINNED, Invariance
from ..common.validate import E4M3, describe, expect, expect_dim, expect_weight_scale


def check_operands(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, op: str = "fp8_grouped_einsum") -> None:
    """Raise E201 unless these are the operands of a grouped product."""
    expect(a, f"{op}: a [T, G, K]", E4M3)
    expect(a_scale, f"{op}: a_scale [T, G, K / 128]", (torch.float32, torch.int32))
    expect(b, f"{op}: b [G * N, K]", E4M3)
    tokens, groups, size = a.shape
    count = cdiv(size, ACT_TILE)
    if a_scale.dtype is torch.int32:
        count = cdiv(count, SCALES_PER_WORD)
    expect_dim(a_scale.shape[0], tokens, f"{op}: a_scale has the tokens of a")
    expect_dim(a_scale.shape[1], groups, f"{op}: a_scale has the groups of a")
    expect_dim(a_scale.shape[2], count, f"{op}: a_scale has one scale per strip of {ACT_TILE}")
    expect_dim(b.shape[1], size, f"{op}: b has the K of a")
    if groups == 0 or b.shape[0] % groups != 0:
        fail("E201", got=f"{groups} groups, b {describe(b)}", rule=f"{op}: the rows of b divide into groups")
    expect_weight_scale(b_scale, b, f"{op}: b_scale")


def _fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    tokens, groups, _ = a.shape
    return a.new_empty((tokens, groups, b.shape[0] // groups), dtype=torch.bfloat16)


fp8_grouped_einsum = define(
    "fp8_grouped_einsum",
    reference=reference.fp8_grouped_einsum,
    fake=_fake,
    check=check_operands,
    kernel="dsv4_compile.kernels.linear.fp8_grouped_einsum",
    cost=CostModel(
        lambda T, G, N, K, s=1: (
            T * G * (K + FLOAT32 * act_tiles(K) + 2 * N) + G * N * K + s * weight_tiles(G * N, K),
            2 * T * G * N * K,
        ),
        sizes=lambda call: call.of_product("a", "b", "b_scale"),
        operands="e4m3",
    ),
    invariant=Invariance(rows=("a", "a_scale"), on_cpu=ALONE, kernel=PINNED),
)


def _check_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    op = "fp8_grouped_einsum_quant"
    check_operands(a, a_scale, b, b_scale, op)
    rows = b.shape[0] // a.shape[1]
    if rows % ACT_TILE != 0:
        fail("E201", got=f"groups of {rows} rows", rule=f"{op}: the rows of a group fill whole strips of {ACT_TILE}")


def _fake_quant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    return new_rows(a, a.shape[0], b.shape[0])


fp8_grouped_einsum_quant = define(
    "fp8_grouped_einsum_quant",
    reference=reference.fp8_grouped_einsum_quant,
    fake=_fake_quant,
    check=_check_quant,
    kernel="dsv4_compile.kernels.linear.fp8_grouped_einsum",
    cost=CostModel(
        lambda T, G, N, K, s=1: (
            T * G * (K + FLOAT32 * act_tiles(K) + N * FP8 + FLOAT32 * act_tiles(N))
            + G * N * K
            + s * weight_tiles(G * N, K),
            2 * T * G * N * K,
        ),
        sizes=lambda call: call.of_product("a", "b", "b_scale"),
        operands="e4m3",
    ),
    invariant=Invariance(rows=("a", "a_scale"), kernel=PINNED),
)
