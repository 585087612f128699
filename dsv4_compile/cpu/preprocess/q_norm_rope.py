"""Norm and RoPE of queries in one pass over them, and with them RoPE and insertion of key/value vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.preprocess import q_norm_rope as reference
from ...reference.preprocess.q_norm_rope import QNormRopeKvInsertArguments
from .. import native
from ..common.invariant import before_sums_by_torch
from .kv_rope_insert import kv_rope_insert


def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Compute the op of this name as its reference does, up to the order of the sum."""
    tokens, heads, dim = q.shape
    plain = q_scale is None and padded_heads <= heads
    if plain and q.stride(1) == dim and native.takes(cos_sin_cache, rows=q, int64=(positions,)):
        out = torch.empty((tokens, heads, dim), dtype=q.dtype)
        rows, rope = cos_sin_cache.shape
        where = q, q.stride(0), out, positions, cos_sin_cache
        native.call("q_norm_rope", *where, tokens, heads, dim, rope, rows, float(eps), torch.get_num_threads())
        return out
    before_sums_by_torch()
    return reference.q_norm_rope(q, positions, cos_sin_cache, eps, padded_heads, q_scale)


def q_norm_rope_kv_insert(call: QNormRopeKvInsertArguments) -> Tensor:
    """Compute the op of this name by the forms of its halves."""
    kv_rope_insert(*call.insert())
    return q_norm_rope(*call.queries())
