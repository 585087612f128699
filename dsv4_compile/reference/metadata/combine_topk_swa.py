"""Index rows of the prefill workspace: for each token its selected compressed entries, then its sliding window.

The workspace holds M rows for each request of a chunk: up to N compressed entries from row 0, and from row N the
gathered raw tokens, the last `gather_len` of the request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import INDEX_ALIGN, PAD_INDEX, align_up
from .batch import token_positions, token_requests, visible_entries
from .index_rows import flatten_rows, to_index


def combine_topk_swa(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    m: int,
    n: int,
) -> tuple[Tensor, Tensor]:
    """Rows of the workspace that each token of a chunk attends.

    Args:
        topk_indices: int `[T, K]`, indices within the request, `topk <= K` used; `topk` 0 = window only.
        query_start_loc: int `[R + 1]`, counted from any token: T begins at its first element.
        seq_lens, gather_lens: int `[R]`.
        m: workspace rows of a request; n: of which compressed entries.

    Returns:
        int32 `[T, A]`, A = `topk + window` aligned to 128, and int32 `[T]`, how many columns count. An index that is
        not in [0, n), or a token that was not gathered into the m - n rows for it, leaves -1 in its column and still
        counts: a row never names rows of another request.
    """
    width = topk + window
    tokens = torch.arange(topk_indices.shape[0], device=topk_indices.device) + query_start_loc[0]
    requests = token_requests(query_start_loc, tokens)
    positions = token_positions(query_start_loc, seq_lens, requests, tokens)[:, None]
    num_entries = visible_entries(positions, ratio).clamp_max(topk)
    num_window = (positions + 1).clamp(0, window)

    columns = torch.arange(align_up(width, INDEX_ALIGN), device=topk_indices.device)
    entries = torch.nn.functional.pad(topk_indices[:, :topk], (0, columns.shape[0] - topk), value=PAD_INDEX).long()
    gathered = _per_token(gather_lens, requests)
    raw = positions - num_window + 1 + columns - num_entries - (_per_token(seq_lens, requests) - gathered)
    is_entry, is_raw = columns < num_entries, columns < num_entries + num_window
    rows = torch.where(
        is_entry,
        torch.where((entries >= 0) & (entries < n), entries, PAD_INDEX),
        torch.where(is_raw & (raw >= 0) & (raw < gathered.clamp_max(m - n)), raw + n, PAD_INDEX),
    )
    rows = torch.where(rows >= 0, rows + m * requests[:, None], PAD_INDEX)
    return to_index(rows), (num_entries + num_window)[:, 0].to(torch.int32)


def _per_token(values: Tensor, requests: Tensor) -> Tensor:
    """Each token's value `[T, 1]` of a per-request tensor `[R]`; 0 for tokens of no request."""
    padded = torch.nn.functional.pad(values.long(), (0, 1))
    return padded[torch.where(requests >= 0, requests, values.shape[0])][:, None]


def combine_topk_swa_ragged(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    m: int,
    n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `combine_topk_swa` gives, as one list.

    Returns `flat` int32 `[T * (topk + window)]` with a -1 tail, `indptr` int32 `[T + 1]` and `lens` int32 `[T]`.
    """
    rows, lens = combine_topk_swa(topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, m, n)
    return *flatten_rows(rows[:, : topk + window], lens), lens
