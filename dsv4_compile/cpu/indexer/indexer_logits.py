"""Selection of the indexer's best entries: no key is read where all visible entries are selected.

A kernel takes float32 keys, a token at a time. With others tokens of one request, which are neighbours in a prompt,
share its keys, and single ones gather their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...layout import PAD_INDEX, cdiv
from ...reference.common import paging
from ...reference.indexer import indexer_logits as reference
from ...reference.indexer.indexer_logits import TOKENS_AT_A_TIME, TopkArguments, select_topk
from .. import native
from ..common.invariant import before_sums_by_torch
from ..common.rows import read_rows


def indexer_logits_topk(op: TopkArguments) -> Tensor:
    """Compute the op of this name as its reference does, with logits up to the order of sums."""
    tokens = op.q.shape[0]
    floats = op.q, op.weights, op.k_cache
    places = op.block_table, op.token_to_req, op.context_lens
    if op.cache_format == "plain" and native.takes(*floats, int32=places):
        out = torch.empty((tokens, op.topk), dtype=torch.int32)
        sizes = *op.q.shape, *op.block_table.shape, op.block_size, op.k_cache.shape[0], op.topk, torch.get_num_threads()
        native.call("indexer_topk", *floats, *places, out, *sizes)
        return out
    before_sums_by_torch()
    requests, lens = op.token_to_req[:tokens], op.context_lens[:tokens]
    longest = min(int(lens.max()), op.block_table.shape[1] * op.block_size) if tokens > 0 else 0
    blocks = _blocks(op, requests, cdiv(max(longest, 0), op.block_size))
    if blocks is None:
        return reference.indexer_logits_topk(op)
    entries = torch.arange(max(longest, 0), dtype=torch.int32)
    visible = entries < lens[:, None]
    if longest <= op.topk:
        selected = torch.where(visible, entries, PAD_INDEX)
        return torch.nn.functional.pad(selected, (0, op.topk - entries.shape[0]), value=PAD_INDEX)
    slots = (blocks[:, :, None] * op.block_size + torch.arange(op.block_size)).flatten(1)[:, :longest]
    indices = []
    for rows, one in _neighbours(requests):
        logits = _logits(op, rows, slots[rows.start] if one else slots[rows])
        indices.append(select_topk(logits, visible[rows], op.topk))
    return torch.cat(indices)


def _blocks(op: TopkArguments, requests: Tensor, count: int) -> Tensor | None:
    """Return the first `count` blocks int64 `[T, count]` of each token's request, None if one does not exist."""
    known = (requests >= 0) & (requests < op.block_table.shape[0])
    if not bool(known.all()):
        return None
    blocks = op.block_table.index_select(0, requests)[:, :count].long()
    exist = paging.valid_slots(blocks, op.k_cache.shape[0], 1)
    return blocks if bool(exist.all()) else None


def _neighbours(requests: Tensor) -> Iterator[tuple[slice, bool]]:
    """Yield slices of at most `TOKENS_AT_A_TIME` tokens, and whether each is of one request."""
    counts = torch.unique_consecutive(requests, return_counts=True)[1].tolist()
    alone = max(counts, default=0) == 1
    start = 0
    for count in [len(counts)] if alone else counts:
        for first in range(start, start + count, TOKENS_AT_A_TIME):
            yield slice(first, min(first + TOKENS_AT_A_TIME, start + count)), not alone
        start += count


def _logits(op: TopkArguments, rows: slice, slots: Tensor) -> Tensor:
    """Return float32 `[n, J]` for keys at `slots`, `[J]` if the tokens share them, else `[n, J]`."""
    q = reference.dequantize_queries(op, rows)
    keys = read_rows(op.k_cache, op.cache_format, op.block_size, slots.reshape(-1))
    if slots.dim() == 1:
        dots = torch.mm(q.flatten(0, 1), keys.t()).relu_().view(*q.shape[:2], -1)
    else:
        dots = torch.bmm(q, keys.view(*slots.shape, -1).transpose(1, 2)).relu_()
    return torch.bmm(op.weights[rows, None], dots)[:, 0]
