"""RMS norm of the query latent and of the key/value vector, the two halves of one projection."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """float32 `x * rsqrt(mean(x^2) + eps) * weight` over the last dim. Nothing is rounded below float32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise both halves of a projection in float32 and round once.

    Args:
        qr: `[T, Lq]`; kv: `[T, D]`. bfloat16, float16 or float32, any strides.
        q_weight: `[Lq]`; kv_weight: `[D]`. Any of those dtypes; the product is taken in float32.
    Returns:
        Contiguous `[T, Lq]` and `[T, D]` in the dtypes of `qr` and `kv`.
    """
    return (
        rms_norm(qr, eps, q_weight).to(qr.dtype).contiguous(),
        rms_norm(kv, eps, kv_weight).to(kv.dtype).contiguous(),
    )
