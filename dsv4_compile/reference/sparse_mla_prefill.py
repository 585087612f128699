"""Sparse attention of every token over rows of one flat workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import attend, gather_keys, token_chunks


def sparse_mla_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the selected rows of `kv`. See attend.py for the formula.

    Args:
        q: `[T, H, D]` bfloat16, float16 or float32.
        kv: `[S, D]` in one of those dtypes, keys and values at once.
        indices: int `[>= T, A]` rows of `kv`; topk_length: int `[>= T]`, how many columns count, None for all.
        scale: factor of the scores. It does not apply to the sink.
        attn_sink: float32 `[H]` logits of a key with value zero; -inf has no effect, +inf gives out 0.
    Returns:
        out: `[T, H, D]` in q's dtype, contiguous.
        max_logits: float32 `[T, H]`, the largest scaled score, -inf where nothing is attended.
        lse: float32 `[T, H]`, natural logarithm, without the sink, +inf where nothing is attended.
    Notes:
        As `sparse_mla_decode`: indices outside [0, S) and columns past the length are ignored, duplicates count twice,
        rows with nothing to attend give 0, one rounding.
    """
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    max_logits, lse = (q.new_empty((tokens, heads), dtype=torch.float32) for _ in range(2))
    for rows in token_chunks(tokens, indices.shape[1], head_dim, q.device):
        lens = None if topk_length is None else topk_length[rows]
        keys, valid = gather_keys(kv[:, None], "plain", 1, indices[rows], lens)
        out[rows], max_logits[rows], lse[rows] = attend(q[rows], keys, valid, scale, attn_sink)
    return out, max_logits, lse
