"""`torch.ops.dsv4.fp8_grouped_einsum_quant`; defined in reference/fp8_grouped_einsum_quant.py."""

from __future__ import annotations

from torch import Tensor

from ..errors import fail
from ..layout import ACT_TILE
from ..reference.block_scale import new_rows
from ..reference.fp8_grouped_einsum_quant import fp8_grouped_einsum_quant as reference
from ._define import define
from .fp8_grouped_einsum import check_operands


def _check(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    op = "fp8_grouped_einsum_quant"
    check_operands(a, a_scale, b, b_scale, op)
    rows = b.shape[0] // a.shape[1]
    if rows % ACT_TILE != 0:
        fail("E201", got=f"groups of {rows} rows", rule=f"{op}: the rows of a group fill whole strips of {ACT_TILE}")


def _fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    return new_rows(a, a.shape[0], b.shape[0])


fp8_grouped_einsum_quant = define(
    "fp8_grouped_einsum_quant(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> (Tensor, Tensor)",
    reference=reference,
    fake=_fake,
    check=_check,
)
