"""Index rows of the prefill workspace: for each token its selected compressed entries, then its sliding window.

The workspace holds M rows for each request of a chunk: up to N compressed entries from row 0, and from row N the
gathered raw tokens, the last `gather_len` of the request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import INDEX_ALIGN, PAD_INDEX, align_up
from .batch import token_positions, token_requests, visible_entries
from .index_rows import flatten_rows, to_index


class CombineTopkArguments(NamedTuple):
    """Arguments of `combine_topk_swa`, in schema order.

    Attributes:
        topk_indices: int `[T, K]`, indices within the request, `topk <= K` used; `topk` 0 = window only.
        query_start_loc: int `[R + 1]`, counted from any token: T begins at its first element.
        seq_lens, gather_lens: int `[R]`.
        m: workspace rows of a request; n: the compressed entries among them.
    """

    topk_indices: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    gather_lens: Tensor
    window: int
    ratio: int
    topk: int
    m: int
    n: int


def combine_topk_swa(op: CombineTopkArguments) -> tuple[Tensor, Tensor]:
    """Rows of the workspace that each token of a chunk attends.


    Returns:
        int32 `[T, A]`, A = `topk + window` aligned to 128, and int32 `[T]`, how many columns count. An index that is
        not in [0, n), or a token that was not gathered into the m - n rows for it, leaves -1 in its column and still
        counts: a row never names rows of other requests.
    """
    width = op.topk + op.window
    tokens = torch.arange(op.topk_indices.shape[0], device=op.topk_indices.device) + op.query_start_loc[0]
    requests = token_requests(op.query_start_loc, tokens)
    positions = token_positions(op.query_start_loc, op.seq_lens, requests, tokens)[:, None]
    num_entries = visible_entries(positions, op.ratio).clamp_max(op.topk)
    num_window = (positions + 1).clamp(0, op.window)

    columns = torch.arange(align_up(width, INDEX_ALIGN), device=op.topk_indices.device)
    entries = torch.nn.functional.pad(
        op.topk_indices[:, : op.topk], (0, columns.shape[0] - op.topk), value=PAD_INDEX
    ).long()
    gathered = _per_token(op.gather_lens, requests)
    raw = positions - num_window + 1 + columns - num_entries - (_per_token(op.seq_lens, requests) - gathered)
    is_entry, is_raw = columns < num_entries, columns < num_entries + num_window
    rows = torch.where(
        is_entry,
        torch.where((entries >= 0) & (entries < op.n), entries, PAD_INDEX),
        torch.where(is_raw & (raw >= 0) & (raw < gathered.clamp_max(op.m - op.n)), raw + op.n, PAD_INDEX),
    )
    rows = torch.where(rows >= 0, rows + op.m * requests[:, None], PAD_INDEX)
    return to_index(rows), (num_entries + num_window)[:, 0].to(torch.int32)


def _per_token(values: Tensor, requests: Tensor) -> Tensor:
    """Each token's value `[T, 1]` of a per-request tensor `[R]`; 0 for tokens of no request."""
    padded = torch.nn.functional.pad(values.long(), (0, 1))
    return padded[torch.where(requests >= 0, requests, values.shape[0])][:, None]


def combine_topk_swa_ragged(op: CombineTopkArguments) -> tuple[Tensor, Tensor, Tensor]:
    """What `combine_topk_swa` gives, as one list.

    Returns `flat` int32 `[T * (topk + window)]` with a -1 tail, `indptr` int32 `[T + 1]` and `lens` int32 `[T]`.
    """
    rows, lens = combine_topk_swa(op)
    return *flatten_rows(rows[:, : op.topk + op.window], lens), lens
