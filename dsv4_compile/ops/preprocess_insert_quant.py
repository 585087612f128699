"""`torch.ops.dsv4.preprocess_insert_quant`; what it computes is in reference/preprocess_insert_quant.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..layout import ACT_TILE, cdiv
from ..reference.block_scale import scale_strides
from ..reference.preprocess_insert_quant import preprocess_insert_quant as reference
from ._define import define
from ._validate import E4M3
from .preprocess_insert import ARGUMENTS, check_insert


def fake(qr: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Results for latents `qr`, as the op gives them."""
    tokens, latent = qr.shape
    count = cdiv(latent, ACT_TILE)
    scale = qr.new_empty_strided((tokens, 1, count), scale_strides(tokens, count), dtype=torch.float32)
    return qr.new_empty((tokens, 1, latent), dtype=E4M3), scale


preprocess_insert_quant = define(
    f"preprocess_insert_quant{ARGUMENTS} -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    check=partial(check_insert, op="preprocess_insert_quant"),
)
