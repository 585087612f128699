"""`torch.ops.dsv4.fp8_grouped_einsum_quant`; defined in reference/fp8_grouped_einsum_quant.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import fail
from ..layout import ACT_TILE
from ..reference.block_scale import scale_strides
from ..reference.fp8_grouped_einsum_quant import fp8_grouped_einsum_quant as reference
from ._define import define
from ._validate import E4M3
from .fp8_grouped_einsum import check_operands


def _check(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    op = "fp8_grouped_einsum_quant"
    check_operands(a, a_scale, b, b_scale, op)
    rows = b.shape[0] // a.shape[1]
    if rows % ACT_TILE != 0:
        fail("E201", got=f"groups of {rows} rows", rule=f"{op}: the rows of a group fill whole strips of {ACT_TILE}")


def _fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    tokens, size = a.shape[0], b.shape[0]
    count = size // ACT_TILE
    scale = a.new_empty_strided((tokens, 1, count), scale_strides(tokens, count), dtype=torch.float32)
    return a.new_empty((tokens, 1, size), dtype=E4M3), scale


fp8_grouped_einsum_quant = define(
    "fp8_grouped_einsum_quant(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> (Tensor, Tensor)",
    reference=reference,
    fake=_fake,
    check=_check,
)
