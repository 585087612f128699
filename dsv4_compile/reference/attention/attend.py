"""Attention of query heads over the keys selected for their token: the mathematics of every sparse MLA op.

    s_j = scale * <q, k_j>      m = max_j s_j      l = sum_j exp(s_j - m)      lse = m + ln l
    out = sum_j exp(s_j - m) k_j / l * 1 / (1 + exp(sink - lse))

The values are the keys, RoPE dims included. A sink is one more logit, not scaled, of a key with value zero: it
is part of the denominator only, and neither of m nor of lse.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ..common import kv_format, paging

GATHER_BYTES = 64 * 2**20
"""Largest size of the float32 keys that are gathered at once."""
GATHER_BYTES_CPU = 4 * 2**20
"""GATHER_BYTES on a CPU, where small chunks that stay in its cache are several times faster than large ones."""


def token_chunks(tokens: int, keys: int, head_dim: int, device: torch.device) -> Iterator[slice]:
    """Split `tokens` so that `keys` float32 vectors for each token of a chunk fit the limit of the device."""
    limit = GATHER_BYTES_CPU if device.type == "cpu" else GATHER_BYTES
    step = max(1, limit // max(1, 4 * keys * head_dim))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def gather_keys(
    cache: Tensor,
    cache_format: str,
    block_size: int,
    indices: Tensor,
    lens: Tensor | None,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the keys float32 `[T, N, D]` at the slots `indices` `[T, N]`, and bool `[T, N]`, which of them are valid.

    An index outside the cache or a column at or past `lens` `[T]` is invalid; its key is zero.
    """
    valid = paging.valid_slots(indices, cache.shape[0], block_size)
    if lens is not None:
        valid = valid & (torch.arange(indices.shape[1], device=indices.device) < lens[:, None])
    slots = torch.where(valid, indices, PAD_INDEX)
    return kv_format.load_kv(cache, cache_format, block_size, slots, kv_scale).float(), valid


def attend(q: Tensor, keys: Tensor, valid: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention over the valid keys of each token.

    Args:
        q: `[T, H, D]`, any float dtype; widened to float32.
        keys: float32 `[T, N, D]`, zero where not valid; valid: bool `[T, N]`.
        sink: float32 `[H]` or None.
    Returns:
        out `[T, H, D]`, m `[T, H]`, lse `[T, H]`, all float32. Without a valid key, or with scores of -inf alone: 0,
        -inf, +inf.
    """
    if keys.shape[1] == 0:
        lse = q.new_full(q.shape[:2], torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape, dtype=torch.float32), -lse, lse
    scores = torch.bmm(q.float(), keys.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~valid[:, None], -torch.inf)
    top = scores.amax(-1)
    # -inf - -inf is NaN: a row without keys is shifted by zero instead.
    weights = scores.sub_(torch.where(top == -torch.inf, 0.0, top)[..., None]).exp_()
    total = weights.sum(-1)
    empty = total == 0
    lse = torch.where(empty, torch.inf, top + total.log())
    # Not torch.sigmoid: on some CPUs its bits depend on the place of an element in its tensor.
    norm = total.reciprocal() if sink is None else (1.0 / (1.0 + (sink - lse).exp())) / total
    return torch.bmm(weights, keys) * torch.where(empty, 0.0, norm)[..., None], top, lse
