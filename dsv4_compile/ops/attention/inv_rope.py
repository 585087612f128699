"""Schemas, checks and fakes of `inv_rope` and `inv_rope_fp8_quant`; reference/attention/ defines what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cpu.attention import inv_rope as cpu
from ...errors import fail
from ...layout import ACT_TILE, SCALES_PER_WORD, cdiv
from ...reference.attention import inv_rope as reference
from ...selection.costs import FLOAT32, FP8, CostModel, act_tiles, angles
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, describe, expect, expect_rope_table, expect_rows


def _check_inv_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor, op: str = "inv_rope") -> None:
    expect(o, f"{op}: o [T, H, D]", FLOATS)
    expect(positions, f"{op}: positions [T]", INTS)
    expect_rows(positions.shape[0], o.shape[0], f"{op}: positions")
    expect_rope_table(cos_sin_cache, op, o.shape[2])


def _fake_inv_rope(o: Tensor, *_: Any, **__: Any) -> Tensor:
    return o.new_empty(o.shape)


def _check_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    n_groups: int,
    heads_per_group: int,
    packed_scales: bool = False,
) -> None:
    op = "inv_rope_fp8_quant"
    _check_inv_rope(o, positions, cos_sin_cache, op)
    check_groups(o, n_groups, heads_per_group, op)


def check_groups(o: Tensor, n_groups: int, heads_per_group: int, op: str) -> None:
    """Raise E201 unless the heads of `o` `[T, H, D]` hold so many groups of whole quantisation tiles."""
    if min(n_groups, heads_per_group) < 1 or o.shape[1] < n_groups * heads_per_group:
        fail("E201", got=describe(o), rule=f"{op}: o has at least {n_groups} x {heads_per_group} heads")
    if heads_per_group * o.shape[2] % ACT_TILE != 0:
        fail("E201", got=describe(o), rule=f"{op}: {heads_per_group} heads fill whole tiles of {ACT_TILE}")


def new_groups(o: Tensor, n_groups: int, heads_per_group: int, packed_scales: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate values and scales for the heads `o` `[T, H, D]`, in the layouts of `inv_rope_fp8_quant`."""
    tokens, size = o.shape[0], heads_per_group * o.shape[2]
    count = size // ACT_TILE
    if packed_scales:
        count = cdiv(count, SCALES_PER_WORD)
    values = o.new_empty_strided(
        (tokens, n_groups, size), reference.value_strides(tokens, size), dtype=torch.float8_e4m3fn
    )
    scale = o.new_empty_strided(
        (tokens, n_groups, count),
        reference.scale_strides(tokens, count),
        dtype=torch.int32 if packed_scales else torch.float32,
    )
    return values, scale


def _fake_quant(o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *groups: Any, **options: Any) -> Any:
    return new_groups(o, *groups, **options)


inv_rope = define(
    "inv_rope",
    reference=reference.inv_rope,
    on_cpu=cpu.inv_rope,
    fake=_fake_inv_rope,
    check=_check_inv_rope,
    kernel="dsv4_compile.kernels.attention.inv_rope",
    lowering="dsv4_compile.lowering.attention.inv_rope",
    cost=CostModel(
        lambda T, H, D, rope, e=2: (T * (angles(rope) + 2 * e * H * D), 0),
        sizes=lambda call: call.of_heads("o") | call.rope,
    ),
    invariant=Invariance(rows=("o", "positions"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
inv_rope_fp8_quant = define(
    "inv_rope_fp8_quant",
    reference=reference.inv_rope_fp8_quant,
    fake=_fake_quant,
    check=_check_quant,
    kernel="dsv4_compile.kernels.attention.inv_rope",
    lowering="dsv4_compile.lowering.attention.inv_rope",
    cost=CostModel(
        lambda T, H, D, rope, e=2: (T * (angles(rope) + (e + FP8) * H * D + FLOAT32 * act_tiles(H * D)), 0),
        sizes=lambda call: call.of_heads("o") | call.rope | call.grouped_heads,
    ),
    invariant=Invariance(rows=("o", "positions"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
