"""Sparse attention over two caches, each in its format: the window and the entries of a source of DeepSeek-V4.1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import paging
from ..common.row_format import load_rows
from .attend import attend, token_chunks


class MixedArguments(NamedTuple):
    """Arguments of `sparse_mla_mixed`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16 or float32, rotated, any strides.
        window, entries: caches of one of `layout.ROW_FORMATS`, whose rows hold D channels; no entries in a layer that
            has a window alone.
        window_slots, entry_slots: int `[T, N]`, rows that a token attends; a slot outside its cache is no key.
        window_format, window_block_size, entry_format, entry_block_size: format and rows of a page of each.
        scale: factor of the scores.
        sink: float32 `[H]`, a logit in the denominator only, not scaled.
    """

    q: Tensor
    window: Tensor
    window_slots: Tensor
    entries: Tensor | None
    entry_slots: Tensor | None
    window_format: str
    window_block_size: int
    entry_format: str
    entry_block_size: int
    scale: float
    sink: Tensor


def sparse_mla_mixed(a: MixedArguments) -> Tensor:
    """Attend the rows of both caches in one softmax, in float32, rounded once.

    The rows are keys and values. A row of a cache that no slot names may hold NaN.

    Returns:
        `[T, H, D]`, contiguous, in q's dtype; zeros for a token without keys.
    """
    out = a.q.new_empty(a.q.shape)
    width = a.window_slots.shape[1] + (0 if a.entry_slots is None else a.entry_slots.shape[1])
    for rows in token_chunks(a.q.shape[0], width, a.q.shape[2], a.q.device):
        parts = [_keys(a.window, a.window_format, a.window_block_size, a.window_slots[rows], a.q.shape[2])]
        if a.entries is not None and a.entry_slots is not None:
            parts.append(_keys(a.entries, a.entry_format, a.entry_block_size, a.entry_slots[rows], a.q.shape[2]))
        keys, valid = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        out[rows] = attend(a.q[rows], keys, valid, a.scale, a.sink)[0].to(a.q.dtype)
    return out


def _keys(cache: Tensor, fmt: str, block_size: int, slots: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return float32 keys `[n, N, D]` and bool `[n, N]`, whether there is one."""
    valid = paging.valid_slots(slots, cache.shape[0], block_size)
    return load_rows(cache, fmt, block_size, slots, channels), valid
