"""`preprocess_insert_quant`: the launch of `preprocess_insert`, whose programs that norm latents quantise them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import ACT_TILE, cdiv
from ..reference.block_scale import scale_strides
from .preprocess_insert import preprocess_insert, preprocess_insert_refuses
from .quant import refuses_fp8


def preprocess_insert_quant(qr: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """See the reference. As those of `preprocess_insert`, latents differ by the order of the sums in their norm."""
    tokens, latent = qr.shape
    count = cdiv(latent, ACT_TILE)
    values = torch.empty((tokens, latent), dtype=torch.float8_e4m3fn, device=qr.device)
    by_strip = torch.empty((count, tokens), dtype=torch.float32, device=qr.device)
    preprocess_insert(qr, *args, **options, into=(values, by_strip))
    return values[:, None], by_strip.as_strided((tokens, 1, count), scale_strides(tokens, count))


def preprocess_insert_quant_refuses(qr: Tensor, *args: Any, **options: Any) -> str:
    """Why a call cannot use the kernel, or ""."""
    return refuses_fp8(qr.device) or preprocess_insert_refuses(qr, *args, **options)
