"""Rows of the engram's table for the n-grams that end at each token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import paging


def engram_rows(
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    pad: int,
) -> Tensor:
    """Hash the 2- to N-grams that end at each token, `M` hashes for each length.

        H_1 = c(p) m_0,   H_n = H_(n-1) xor c(p - n + 1) m_(n-1),   row (n, h) = H_n mod P[n, h] + the earlier primes

    c is the id at a position, and `pad` from the start of the request on backwards, or from an id of -1 on. Ids of
    earlier positions are those of earlier rows of the step, if these are the positions before of the same request, else
    those of `history`, which is read before it is written. Tokens of a request are consecutive rows with ascending
    positions.

    Args:
        ids: int `[T]`, of the compressed vocabulary; -1 for image tokens.
        positions, requests: int `[T]`; negative for padding, which gives rows of `pad` alone and writes nothing.
        history: int32 `[R, S]`, the id of the position `p` in column `p % S` of its request; S is at least N - 1.
        multipliers: int64 `[N]`; products with ids stay below 2^63.
        primes: int64 `[(N - 1) * M]`, of the 2-grams first.
    Returns:
        int64 `[T, (N - 1) * M]`, contiguous, below the sum of primes.
    """
    orders, size = multipliers.shape[0], history.shape[1]
    ids, positions, requests = ids.long(), positions.long(), requests.long()
    live = (positions >= 0) & (requests >= 0) & (requests < history.shape[0])
    request, position = torch.where(live, requests, 0), torch.where(live, positions, 0)
    row = torch.arange(ids.shape[0], device=ids.device)
    reached = live & (ids >= 0)
    hashes, term = [], torch.where(reached, ids, pad) * multipliers[0]
    for back in range(1, orders):
        before = (row - back).clamp_min(0)
        in_step = (row >= back) & (requests[before] == requests) & (positions[before] == positions - back)
        noted = history[request, (position - back) % size].long() if history.shape[0] else ids
        other = torch.where(in_step, ids[before], noted)
        reached = reached & (position >= back) & (other >= 0)
        term = term ^ (torch.where(reached, other, pad) * multipliers[back])
        hashes.append(term)
    _store(history, request, position, live, ids)
    first = torch.cumsum(primes, 0) - primes
    return (torch.stack(hashes, 1)[..., None] % primes.view(orders - 1, -1)).flatten(1) + first


def _store(history: Tensor, request: Tensor, position: Tensor, live: Tensor, ids: Tensor) -> None:
    """Write the ids of the last tokens of each request, as many as it has columns."""
    if history.shape[0] == 0 or ids.shape[0] == 0:
        return
    newest = torch.full((history.shape[0],), -1, dtype=torch.long, device=history.device)
    newest = newest.scatter_reduce(0, request, torch.where(live, position, -1), "amax")
    keep = live & (position > newest[request] - history.shape[1])
    paging.write_rows(history, (request, position % history.shape[1]), ids.to(torch.int32), keep)
