"""`torch.ops.dsv4.preprocess_insert_quant`; what it computes is in reference/preprocess_insert_quant.py."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..reference.block_scale import new_rows
from ..reference.preprocess_insert_quant import preprocess_insert_quant as reference
from ._define import define
from .preprocess_insert import ARGUMENTS, check_insert


def fake(qr: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Results for latents `qr`, as the op gives them."""
    return new_rows(qr, *qr.shape)


preprocess_insert_quant = define(
    f"preprocess_insert_quant{ARGUMENTS} -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    check=partial(check_insert, op="preprocess_insert_quant"),
)
