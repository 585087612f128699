"""Sparse attention over rows of which only the leading dims are values: DeepSeek-V3.2's latent and its rotated key."""

from __future__ import annotations

import torch
from torch import Tensor

from . import sparse_mla_decode as whole


def sparse_mla_decode_latent(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend the selected rows of a cache; all dims make the scores, the first `value_dim` make the output.

    Args:
        q: `[T, H, D]` bfloat16, float16 or float32.
        k_cache: rows `[P, S, D]` in one of those dtypes, S = `block_size`.
        indices: int `[>= T, K]` physical slots; lens: int `[>= T]`, how many columns of a row count.
        scale: factor of the scores.
        value_dim: V, at most D.
    Returns:
        out: `[T, H, V]` in q's dtype, contiguous.
        lse: float32 `[T, H]`, natural logarithm, +inf where nothing is attended.
    Notes:
        `sparse_mla_decode` of one plain cache, of whose output the first V dims are kept: every dim of an output is a
        sum of its own. Invalid slots, columns past a length, duplicates and empty rows as there.
    """
    out, lse = whole.sparse_mla_decode(q, k_cache, indices, lens, block_size, "plain", scale)
    return out[..., :value_dim].clone(memory_format=torch.contiguous_format), lse
