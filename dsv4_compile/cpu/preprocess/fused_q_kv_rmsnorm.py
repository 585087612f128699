"""RMS norm of the query latent and of the key/value vector in one pass over each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.preprocess.fused_q_kv_rmsnorm import rms_norm
from .. import native
from ..common.invariant import before_sums_by_torch


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does, up to the order of sums."""
    return _normed(qr, q_weight, eps), _normed(kv, kv_weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if native.takes(weight, rows=x):
        out = torch.empty(x.shape, dtype=x.dtype)
        native.call("rms_norm", x, x.stride(0), weight, out, *x.shape, float(eps))
        return out
    before_sums_by_torch()
    return rms_norm(x, eps, weight).to(x.dtype).contiguous()
