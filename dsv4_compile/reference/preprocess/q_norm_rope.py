"""Norm and RoPE of queries, and with them RoPE and insertion of key/value vectors.

Between their projection and attention, queries get an unweighted RMS norm per head, RoPE, and zero heads as padding.
Key/value vectors, one for all heads of a token, are rotated and stored in the paged cache. Each half has an op, and one
op does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.quant import to_e4m3
from ..common.rope import apply_rope
from .fused_q_kv_rmsnorm import rms_norm
from .kv_rope_insert import kv_rope_insert


def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Normalize each head of `q`, rotate its last `rope_dim`, and pad with zero heads.

    All arithmetic is float32, rounded once at the end: nothing is rounded between norm and rotation.

    Args:
        q: `[T, H, D]` bfloat16, float16 or float32, any strides.
        positions: int32 or int64 `[>= T]`; rows past T are ignored.
        cos_sin_cache: float32 `[max_pos, rope_dim]`.
        padded_heads: smallest number of heads to return.
        q_scale: one float32 element. Given, the result is e4m3 of the value times float32(1 / q_scale), clamped to 448.
    Returns:
        Contiguous `[T, max(H, padded_heads), D]` in q's dtype, or e4m3.
    """
    tokens, heads, dim = q.shape
    x = apply_rope(rms_norm(q, eps), positions[:tokens], cos_sin_cache)
    y = x.to(q.dtype) if q_scale is None else to_e4m3(x * (1.0 / q_scale.reshape(())))
    if not padded_heads:
        return y
    out = torch.zeros((tokens, max(heads, padded_heads), dim), dtype=y.dtype, device=y.device)
    out[:, :heads] = y
    return out


class QNormRopeKvInsertArguments(NamedTuple):
    """Arguments of `q_norm_rope_kv_insert`, in schema order; each as in `q_norm_rope` and `kv_rope_insert`."""

    q: Tensor
    kv: Tensor
    k_cache: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    eps: float
    block_size: int
    cache_format: str
    padded_heads: int = 0
    q_scale: Tensor | None = None
    kv_scale: Tensor | None = None

    def queries(self) -> tuple[Any, ...]:
        """Return the arguments of `q_norm_rope`."""
        return self.q, self.positions, self.cos_sin_cache, self.eps, self.padded_heads, self.q_scale

    def insert(self) -> tuple[Any, ...]:
        """Return the arguments of `kv_rope_insert`."""
        where = self.k_cache, self.slot_mapping, self.positions, self.cos_sin_cache
        return (self.kv, *where, self.block_size, self.cache_format, self.kv_scale)


def q_norm_rope_kv_insert(call: QNormRopeKvInsertArguments) -> Tensor:
    """Run `kv_rope_insert` of kv and `q_norm_rope` of q, for a kernel that does both in one launch.

    Returns what `q_norm_rope` returns. Every row of q is computed, padding rows included.
    """
    kv_rope_insert(*call.insert())
    return q_norm_rope(*call.queries())
