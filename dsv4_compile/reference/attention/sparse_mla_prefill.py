"""Sparse attention of every token over rows of one flat workspace.

Attention straight from paged caches needs no op of its own: a token of a prefill is a row of slots like any other, and
`sparse_mla_decode` attends it. A workspace pays where many tokens select the same keys, each of which is then
dequantised once and not once for every token; paged reading pays where they do not, and needs no memory. Both give the
same `out` and `lse`. `max_logits` belongs to the workspace alone: what joins partial results is `lse`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layout import PAD_INDEX
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

    def selected(tokens: slice) -> tuple[Tensor, Tensor | None]:
        return indices[tokens], None if topk_length is None else topk_length[tokens]

    return _attend_workspace(q, kv, selected, indices.shape[1], scale, attn_sink)


def sparse_mla_prefill_ragged(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_mla_prefill` of index rows that follow one another in one list, as `combine_topk_swa_ragged` gives them.

    Args:
        q, kv, scale, attn_sink: as for `sparse_mla_prefill`.
        indices: int `[N]` rows of `kv`. Token t attends `indices[indptr[t] : indptr[t + 1]]`.
        indptr: int `[>= T + 1]`. Positions that the list does not have are ignored.
        max_row: how many entries of a row count, 0 for all. What this op reads ahead is bounded by it: give the
            greatest length that rows can have wherever it is known.
    Returns:
        As `sparse_mla_prefill`.
    """
    total = indices.shape[0]
    width = min(max_row, total) if max_row > 0 else total
    columns = torch.arange(width, device=q.device)

    def selected(tokens: slice) -> tuple[Tensor, Tensor | None]:
        places = indptr[tokens, None] + columns
        ends = indptr[tokens.start + 1 : tokens.stop + 1, None]
        known = (places >= 0) & (places < ends) & (places < total)
        return torch.where(known, indices[torch.where(known, places, 0)], PAD_INDEX), None

    return _attend_workspace(q, kv, selected, width, scale, attn_sink)


def _attend_workspace(
    q: Tensor,
    kv: Tensor,
    selected: Callable[[slice], tuple[Tensor, Tensor | None]],
    width: int,
    scale: float,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the rows that `selected` gives for a slice of tokens: indices `[n, width]`, and their number or None."""
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    max_logits, lse = (q.new_empty((tokens, heads), dtype=torch.float32) for _ in range(2))
    for rows in token_chunks(tokens, width, head_dim, q.device):
        keys, valid = gather_keys(kv[:, None], "plain", 1, *selected(rows))
        out[rows], max_logits[rows], lse[rows] = attend(q[rows], keys, valid, scale, attn_sink)
    return out, max_logits, lse
