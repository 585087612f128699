"""Formulas for a token of a batch: its request, its position, and the entries that it may see.

-1 stands for "no request" and "no position" (padding); every function here passes it on as padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX


def token_requests(query_start_loc: Tensor, tokens: Tensor) -> Tensor:
    """int64 `[T]`: the request each token belongs to; -1 in front of the first request and behind the last.

    Args:
        query_start_loc: int `[R + 1]`, first token of each request and the end of the last, not decreasing.
        tokens: int64 `[T]`, token indices as `query_start_loc` counts them.
    """
    starts = query_start_loc.to(tokens.dtype).contiguous()
    requests = torch.searchsorted(starts, tokens, right=True) - 1
    return torch.where(requests < query_start_loc.shape[0] - 1, requests, PAD_INDEX)


def token_positions(query_start_loc: Tensor, seq_lens: Tensor, requests: Tensor, tokens: Tensor) -> Tensor:
    """int64 `[T]`: position of each token in its request, `seq_len - query_len + offset in the query`.

    -1 for a token outside the query of its request, and for one of a request that is no row or shorter than its query,
    as the requests that pad a captured batch are.

    Args:
        query_start_loc: int `[R + 1]`; seq_lens: int `[R]`; requests: int `[T]`; tokens: int64 `[T]`.
    """
    rows = seq_lens.shape[0]
    if rows == 0:
        return torch.full_like(tokens, PAD_INDEX)
    known = (requests >= 0) & (requests < rows)
    request = torch.where(known, requests, 0).long()
    start, end = query_start_loc[request], query_start_loc[request + 1]
    positions = tokens - end + seq_lens[request]
    return torch.where(known & (tokens >= start) & (tokens < end) & (positions >= 0), positions, PAD_INDEX)


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """Compressed entries a token may see: the groups of `ratio` tokens completed at its position. 0 for padding."""
    return torch.where(positions >= 0, (positions + 1) // ratio, 0)
