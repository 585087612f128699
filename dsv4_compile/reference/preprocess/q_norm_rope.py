"""What happens to queries, keys and values between their projections and attention.

Queries: unweighted RMS norm per head, RoPE, heads padded with zeros. Keys and values, one shared vector per token:
RoPE, then the row is stored in the paged cache. The two halves have an op each, and one op does both.
"""

from __future__ import annotations

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
    """Normalise each head of `q`, rotate its last `rope_dim`, and pad with zero heads.

    Everything is float32 and rounded once, at the end: there is no rounding between norm and rotation.

    Args:
        q: `[T, H, D]` bfloat16, float16 or float32, any strides.
        positions: int32 or int64 `[>= T]`; rows past T are ignored.
        cos_sin_cache: float32 `[max_pos, rope_dim]`.
        padded_heads: number of heads to return at least.
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


def q_norm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    block_size: int,
    cache_format: str,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """`kv_rope_insert` of `kv` and `q_norm_rope` of `q`, for a kernel that does both in one launch.

    Returns what `q_norm_rope` returns; the arguments are theirs. Every row of q is computed, padding rows included.
    """
    kv_rope_insert(kv, k_cache, slot_mapping, positions, cos_sin_cache, block_size, cache_format, kv_scale)
    return q_norm_rope(q, positions, cos_sin_cache, eps, padded_heads, q_scale)
