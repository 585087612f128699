"""Batches and paged addressing in plain Python: the oracle for metadata, for index ops and for their kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from .generate import hostile_values

Table = list[list[int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests with `query_lens[r]` tokens in this step and `seq_lens[r]` in all, then `padding` tokens.

    A graph-padded request has seq_len 0; its query, if it has one, is padding.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return sum(self.query_lens) + self.padding

    def tokens(self) -> list[tuple[int, int]]:
        """Request and position of each token; position -1 for padding, request -1 after the last request."""
        tokens = []
        for request, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            tokens += [(request, max(position, -1)) for position in range(seq_len - query_len, seq_len)]
        return tokens + [(-1, -1)] * self.padding

    def query_start_loc(self) -> Tensor:
        """int32 `[R + 1]`."""
        starts = [sum(self.query_lens[:request]) for request in range(len(self.query_lens) + 1)]
        return torch.tensor(starts, dtype=torch.int32)

    def seq_lens_tensor(self) -> Tensor:
        """int32 `[R]`."""
        return torch.tensor(self.seq_lens, dtype=torch.int32)

    def slot_mapping(self) -> Tensor:
        """int64 `[T]`: 0 for tokens, -1 for padding, where only the sign matters."""
        return torch.tensor([0 if position >= 0 else -1 for _, position in self.tokens()], dtype=torch.int64)


def random_batch(rng: random.Random, *, max_seq_len: int, max_requests: int = 6) -> Batch:
    """Decodes of one or several tokens, chunked and whole prefills, padded requests and tokens, in this order."""
    sizes: list[tuple[int, int]] = []
    for _ in range(rng.randint(0, max_requests)):
        seq_len = rng.randint(1, max_seq_len)
        query_len = rng.choice((1, min(seq_len, rng.randint(2, 4)), rng.randint(1, seq_len), seq_len))
        sizes.append((query_len, seq_len))
    sizes.sort()
    sizes += [(rng.choice((0, 0, 2)), 0) for _ in range(rng.randint(0, 2))]
    query_lens, seq_lens = zip(*sizes, strict=True) if sizes else ((), ())
    return Batch(query_lens, seq_lens, padding=rng.choice((0, 0, 1, 5)))


def random_table(rng: random.Random, rows: int, columns: int, *, hostile: bool = False) -> Table:
    """Block table of distinct pages in random order; if `hostile`, a third of its entries are no page at all."""
    pages = rng.sample(range(rows * columns), rows * columns)
    table = [pages[row * columns : (row + 1) * columns] for row in range(rows)]
    if hostile:
        values = hostile_values(rows * columns)
        table = [[rng.choice(values) if rng.random() < 1 / 3 else page for page in row] for row in table]
    return table


def table_tensor(table: Table, columns: int = 0) -> Tensor:
    """int32 `[R, B]`; `columns` is B where there is no row to tell."""
    return torch.tensor(table, dtype=torch.int32).view(len(table), len(table[0]) if table else columns)


def slot(table: Table, request: int, logical: int, block_size: int) -> int:
    """Physical slot of the token or entry `logical` of a request; -1 where request, column or page does not exist."""
    if not 0 <= request < len(table) or not 0 <= logical < len(table[request]) * block_size:
        return layout.PAD_SLOT
    page = table[request][logical // block_size]
    return page * block_size + logical % block_size if page >= 0 else layout.PAD_SLOT


def index(table: Table, request: int, logical: int, block_size: int) -> int:
    """`slot` as an int32 index row holds it: -1 where it does not fit."""
    value = slot(table, request, logical, block_size)
    return value if value < 2**31 else layout.PAD_INDEX


def row(values: Sequence[int], width: int) -> list[int]:
    """`values`, then -1 up to `width`."""
    return [*values, *[layout.PAD_INDEX] * (width - len(values))]


def compressed_slot(table: Table, request: int, position: int, block_size: int, ratio: int) -> int:
    """Slot of the entry that the token at `position` completes, or -1."""
    if position < 0 or (position + 1) % ratio:
        return layout.PAD_SLOT
    return slot(table, request, position // ratio, block_size)


def window_row(table: Table, request: int, position: int, window: int, block_size: int) -> tuple[list[int], int]:
    """Index row of the last `window` positions up to `position`, and its length."""
    positions = range(max(position - window + 1, 0), position + 1)
    return row([index(table, request, p, block_size) for p in positions], window), len(positions)


def entry_row(
    table: Table, request: int, position: int, width: int, block_size: int, ratio: int
) -> tuple[list[int], int]:
    """Index row of all compressed entries visible at `position`, and its length."""
    count = min((position + 1) // ratio, width)
    return row([index(table, request, entry, block_size) for entry in range(count)], width), count
