"""Sparse attention of every token over slots of one or two paged caches, joined in one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import attend, gather_keys, token_chunks


def output_dtype(q: Tensor) -> torch.dtype:
    """Attention returns the dtype of its queries, and bfloat16 for quantised ones."""
    return torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype


def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the selected slots of a window cache and, if given, of a compressed cache. See attend.py for the formula.

    Every token is a row of its own, in decode and prefill alike: there is no mask, causality is in the indices.

    Args:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: window cache in `cache_format`, pages of `block_size` tokens.
        indices: int `[>= T, W]` physical slots; lens: int `[>= T]`, how many columns of a row count.
        scale: factor of the scores. It does not apply to the sink.
        attn_sink: float32 `[H]` logits of a key with value zero; -inf has no effect, +inf gives out 0.
        extra_k_cache, extra_indices, extra_lens, extra_block_size: a second cache, `[>= T, K]` slots; all or none.
        kv_scale: float32, one element, scale of both `fp8` caches.
    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        An index that is negative or past the cache, and a column at or past its length, is ignored; it need not be
        at the end of the row. A slot that is listed twice counts twice. A row with nothing to attend gives out 0 and
        lse +inf. Keys are dequantised to bfloat16; everything else is float32 and rounded once, into `out`. Tokens do
        not influence each other. Keys are gathered for a bounded number of tokens at a time.
    """
    tokens, heads, head_dim = q.shape
    caches = [(k_cache, block_size, indices, lens)]
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        caches.append((extra_k_cache, extra_block_size, extra_indices, extra_lens))
    out = q.new_empty(q.shape, dtype=output_dtype(q))
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    for rows in token_chunks(tokens, sum(entry[2].shape[1] for entry in caches), head_dim, q.device):
        parts = [
            gather_keys(cache, cache_format, block, slots[rows], count[rows], kv_scale)
            for cache, block, slots, count in caches
        ]
        keys, valid = parts[0] if len(parts) == 1 else (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        out[rows], _, lse[rows] = attend(q[rows], keys, valid, scale, attn_sink)
    return out, lse
