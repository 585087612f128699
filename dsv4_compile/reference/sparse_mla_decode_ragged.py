"""Sparse attention of every token over slots of one or two paged caches, listed one after the other (CSR)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import PAD_INDEX
from . import sparse_mla_decode as dense


def sparse_mla_decode_ragged(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> tuple[Tensor, Tensor]:
    """What `sparse_mla_decode` computes, for index rows without padding between them.

    Args:
        q: `[T, H, D]` bfloat16, float16, float32, or e4m3 with its scale folded into `scale`.
        k_cache: cache in `cache_format`, pages of `block_size` tokens. A gathered workspace `[S, D]` is a `plain` cache
            of pages of one token, `kv[:, None]`.
        indices: int `[N]` physical slots; indptr: int `[> T]`. Token t attends
            `indices[indptr[t] : indptr[t + 1]]`. What lies behind the last token's end is never read, so N may be a
            capacity.
        scale, attn_sink, kv_scale: as `sparse_mla_decode`.
        extra_k_cache, extra_indices, extra_indptr, extra_block_size: a second cache and its list; all or none.
        max_entries, extra_max_entries: most entries a row has; the rest of a longer row is ignored. 0 = N. The
            definition is as slow as this bound is loose.
    Returns:
        out: `[T, H, D]` in q's dtype (bfloat16 for e4m3), contiguous.
        lse: float32 `[T, H]`, natural logarithm over both caches, without the sink.
    Notes:
        Bit for bit `sparse_mla_decode` of rows that hold the same entries in the same order, padded to the same widths.
        A slot out of range, and a part of a row that lies outside [0, N), is ignored; an end in front of its begin is
        an empty row. A row with nothing to attend gives out 0 and lse +inf.
    """
    tokens = q.shape[0]
    rows, lens = dense_rows(indices, indptr, tokens, max_entries)
    extra_rows = extra_lens = None
    if extra_indices is not None and extra_indptr is not None:
        extra_rows, extra_lens = dense_rows(extra_indices, extra_indptr, tokens, extra_max_entries)
    return dense.sparse_mla_decode(
        q,
        k_cache,
        rows,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_rows,
        extra_lens,
        extra_block_size,
        kv_scale,
    )


def dense_rows(indices: Tensor, indptr: Tensor, tokens: int, max_entries: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` rows of a list as `[T, max_entries]` with a -1 tail, and their lengths `[T]`."""
    capacity = indices.shape[0]
    width = max_entries or capacity
    begin, end = indptr[:tokens].long(), indptr[1 : tokens + 1].long()
    place = begin[:, None] + torch.arange(width, device=indices.device)
    inside = (place >= 0) & (place < capacity) & (place < end[:, None])
    if capacity == 0:
        return indices.new_full((tokens, width), PAD_INDEX), (end - begin).clamp(0, width).to(indptr.dtype)
    rows = torch.where(inside, indices[torch.where(inside, place, 0)], PAD_INDEX)
    return rows, (end - begin).clamp(0, width).to(indptr.dtype)
