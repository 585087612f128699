"""Calls for fingerprints of kernels, continued: two-level selection of DeepSeek-V4.1."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_compile.layout import V41_ENTRY_BLOCK
from tests.tools.fingerprint_calls import KEY_D, Args, Calls, cache, ints, longs, register, rope, zeros

HEADS, TOPK, BLOCKS, SIZE = 32, 512, 2048, 8


def _selection(tokens: int, pages: int, fmt: str = "mxfp4") -> Args:
    """Return the arguments of `index_topk` up to `grid`."""
    keys: Tensor = cache(fmt, V41_ENTRY_BLOCK, KEY_D)
    q, weights, table = zeros(tokens, HEADS, KEY_D), zeros(tokens, HEADS), ints(8, pages)
    per_token = longs(tokens), ints(tokens)
    return q, weights, longs(tokens), rope(), keys, table, *per_token, V41_ENTRY_BLOCK, fmt, TOPK, "mxfp4"


@register
def index_topk() -> Calls:
    """Yield layers of ratio 2, in mxfp4 and plain rows, and later layers inside candidates."""
    for tokens, pages, fmt in ((1, 64, "mxfp4"), (6, 1024, "mxfp4"), (3000, 64, "mxfp4"), (1, 64, "plain")):
        yield f"{tokens} tokens, {pages} pages, {fmt}", _selection(tokens, pages, fmt)
    for tokens in (1, 300):
        candidates = torch.zeros(tokens, BLOCKS, dtype=torch.int32)
        yield f"{tokens} tokens, candidates", (*_selection(tokens, 1024), candidates, SIZE)


@register
def index_topk_blocks() -> Calls:
    """Yield the source of candidates for a short and a long context."""
    for tokens, pages in ((1, 64), (6, 16384)):
        yield f"{tokens} tokens, {pages} pages", (*_selection(tokens, pages), None, SIZE, BLOCKS)
