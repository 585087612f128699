"""A batch for an attention backend: full random caches, an indexer's choice, and the exact answer.

What each token attends is worked out in plain Python from the block tables, so the answer knows nothing of the
metadata, the index rows and the workspaces that a backend makes of the same batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing.batch import Batch, Table, entry_row, index, random_table, row, table_tensor, window_row
from dsv4_compile.testing.generate import RandomCache, random_cache


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One layer and one step of T tokens.

    Attributes:
        batch: query and sequence lengths, decodes first. ratio: of the layer. window: W.
        window_cache, extra_cache: full of random vectors; the second is None at ratio 1.
        window_table, extra_table: block tables, as lists.
        topk: int32 `[T, K]`, compressed entries within the request that the indexer chose; ratio 4 only.
        q: `[T, H, D]`. sink: float32 `[H]`. scale: of the scores.
    """

    batch: Batch
    ratio: int
    window: int
    window_cache: RandomCache
    extra_cache: RandomCache | None
    window_table: Table
    extra_table: Table
    topk: Tensor | None
    q: Tensor
    sink: Tensor
    scale: float

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both block tables, int32 `[R, B]`."""
        return table_tensor(self.window_table, 1), table_tensor(self.extra_table, 1)

    def positions(self) -> Tensor:
        """int64 `[T]`, 0 for padding."""
        return torch.tensor([max(position, 0) for _, position in self.batch.tokens()], dtype=torch.int64)

    def selected(self, token: int) -> tuple[list[int], list[int]]:
        """Slots that a token attends, in the window's cache and in the extra cache; none for padding."""
        request, position = self.batch.tokens()[token]
        if position < 0:
            return [], []
        slots, count = window_row(self.window_table, request, position, self.window, self.window_cache.block_size)
        entries: list[int] = []
        if self.extra_cache is not None:
            block = self.extra_cache.block_size
            if self.topk is None:
                width = layout.cdiv(position + 1, self.ratio) + 1
                entries, number = entry_row(self.extra_table, request, position, width, block, self.ratio)
                entries = entries[:number]
            else:
                chosen = [int(entry) for entry in self.topk[token] if entry >= 0]
                entries = [index(self.extra_table, request, entry, block) for entry in chosen]
        return slots[:count], entries

    def expected(self) -> Tensor:
        """The exact output, float64 `[T, H, D]`."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for token in range(self.q.shape[0]):
            slots, entries = self.selected(token)
            keys = [_keys(self.window_cache, slots)]
            if self.extra_cache is not None:
                keys.append(_keys(self.extra_cache, entries))
            out[token] = _attend(self.q[token].double(), torch.cat(keys), self.scale, self.sink.double())
        return out


def _keys(cache: RandomCache, slots: list[int]) -> Tensor:
    """Stored vectors, float64 `[n, D]`."""
    where = torch.tensor(slots, dtype=torch.int64)
    return kv_format.load_kv(cache.cache, cache.fmt, cache.block_size, where, cache.kv_scale).double()


def _attend(q: Tensor, keys: Tensor, scale: float, sink: Tensor) -> Tensor:
    """One token: q `[H, D]`, keys `[n, D]`; a sink is a key of value zero."""
    scores = torch.cat((scale * q @ keys.T, sink[:, None]), dim=1)
    return torch.softmax(scores, dim=1)[:, :-1] @ keys


def random_case(
    rng: random.Random,
    batch: Batch,
    *,
    ratio: int,
    fmt: str,
    max_requests: int = 0,
    max_model_len: int = 0,
    heads: int = 4,
    head_dim: int = layout.HEAD_DIM,
    window: int = layout.SLIDING_WINDOW,
    topk: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    generator: torch.Generator | None = None,
) -> AttentionCase:
    """Random caches and queries for a batch.

    `fmt` is a KV format; plain rows have dtype `dtype`. Block tables and caches are for `max_requests` requests of
    `max_model_len` tokens, so that batches differ in nothing else; 0 = as the batch needs.
    """
    requests = max_requests or max(len(batch.seq_lens), 1)
    longest = max_model_len or max(batch.seq_lens, default=0)

    def paged(block: int, tokens: int) -> tuple[RandomCache, Table]:
        table = random_table(rng, requests, max(layout.cdiv(longest, tokens), 1))
        pages = len(table) * len(table[0])
        cache = random_cache(fmt, pages, block, live=pages * block, head_dim=head_dim, dtype=dtype, generator=generator)
        return cache, table

    window_cache, window_table = paged(layout.WINDOW_BLOCK, layout.WINDOW_BLOCK)
    extra_cache, extra_table = (None, [[0]] * requests)
    if ratio > 1:
        extra_cache, extra_table = paged(layout.storage_block_size(ratio), layout.KV_BLOCK)
    return AttentionCase(
        batch=batch,
        ratio=ratio,
        window=window,
        window_cache=window_cache,
        extra_cache=extra_cache,
        window_table=window_table,
        extra_table=extra_table,
        topk=_choice(rng, batch, ratio, topk) if ratio == layout.CSA_RATIO else None,
        q=torch.randn(batch.num_tokens, heads, head_dim, generator=generator).to(dtype),
        sink=torch.randn(heads, generator=generator),
        scale=head_dim**-0.5,
    )


def _choice(rng: random.Random, batch: Batch, ratio: int, topk: int) -> Tensor:
    """int32 `[T, K]`: as many visible entries as there are and fit, in random order, then -1."""
    rows = []
    for _, position in batch.tokens():
        visible = max(position + 1, 0) // ratio
        rows.append(row(rng.sample(range(visible), min(visible, topk)), topk))
    return torch.tensor(rows, dtype=torch.int32).view(batch.num_tokens, topk)
