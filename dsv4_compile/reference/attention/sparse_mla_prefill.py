"""Sparse attention of every token over rows of one flat workspace.

`sparse_mla_decode` attends paged caches directly: a token of a prefill is a row of slots like any other. A workspace
pays where many tokens select the same keys, because each key is dequantised once and not once per token; paged reading
pays where they do not, and needs no memory. Both give the same `out` and `lse`. Only the workspace form has
`max_logits`; partial results are combined by `lse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from .attend import attend, gather_keys, token_chunks


class PrefillArguments(NamedTuple):
    """Arguments of `sparse_mla_prefill`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16 or float32.
        kv: `[S, D]` in one of those dtypes, keys and values at once.
        indices: int `[>= T, A]` rows of `kv`; topk_length: int `[>= T]`, number of valid columns, None for all.
        scale: factor of the scores. It does not apply to the sink.
        attn_sink: float32 `[H]` logits of a key with value zero; -inf has no effect, +inf gives out 0.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    scale: float
    attn_sink: Tensor | None = None


class RaggedPrefillArguments(NamedTuple):
    """Arguments of `sparse_mla_prefill_ragged`, in schema order.

    Attributes:
        q, kv, scale, attn_sink: as in `PrefillArguments`.
        indices: int `[N]` rows of `kv`. Token t attends `indices[indptr[t] : indptr[t + 1]]`.
        indptr: int `[>= T + 1]`. Positions that the list does not have are ignored.
        max_row: number of entries of a row that count, 0 for all. It bounds the work: give the greatest length that
            rows can have wherever it is known.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    indptr: Tensor
    scale: float
    attn_sink: Tensor | None = None
    max_row: int = 0

    def width(self) -> int:
        """Return the largest number of entries that a row can have."""
        total = self.indices.shape[0]
        return min(self.max_row, total) if self.max_row > 0 else total


def sparse_mla_prefill(call: PrefillArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the selected rows of `kv`. attend.py has the formula.

    Returns:
        out: `[T, H, D]` in q's dtype, contiguous.
        max_logits: float32 `[T, H]`, the largest scaled score, -inf where nothing is attended.
        lse: float32 `[T, H]`, natural logarithm, without the sink, +inf where nothing is attended.
    Notes:
        As in `sparse_mla_decode`, indices outside [0, S) and columns past the length are ignored, duplicates count
        twice, rows with nothing to attend give 0, and results are rounded once.
    """

    def selected(tokens: slice) -> tuple[Tensor, Tensor | None]:
        return call.indices[tokens], None if call.topk_length is None else call.topk_length[tokens]

    return _attend_workspace(call, selected, call.indices.shape[1])


def sparse_mla_prefill_ragged(call: RaggedPrefillArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `sparse_mla_prefill` for index rows that follow each other in one list (CSR).

    Returns:
        out, max_logits, lse: as `sparse_mla_prefill`.
    """
    total, width = call.indices.shape[0], call.width()
    columns = torch.arange(width, device=call.q.device)

    def selected(tokens: slice) -> tuple[Tensor, Tensor | None]:
        places = call.indptr[tokens, None] + columns
        ends = call.indptr[tokens.start + 1 : tokens.stop + 1, None]
        known = (places >= 0) & (places < ends) & (places < total)
        return torch.where(known, call.indices[torch.where(known, places, 0)], PAD_INDEX), None

    return _attend_workspace(call, selected, width)


def _attend_workspace(
    call: PrefillArguments | RaggedPrefillArguments,
    selected: Callable[[slice], tuple[Tensor, Tensor | None]],
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the rows that `selected` returns for a slice of tokens: indices `[n, width]`, and lengths or None."""
    q = call.q
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    max_logits, lse = (q.new_empty((tokens, heads), dtype=torch.float32) for _ in range(2))
    for rows in token_chunks(tokens, width, head_dim, q.device):
        keys, valid = gather_keys(call.kv[:, None], "plain", 1, *selected(rows))
        out[rows], max_logits[rows], lse[rows] = attend(q[rows], keys, valid, call.scale, call.attn_sink)
    return out, max_logits, lse
