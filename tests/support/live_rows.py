"""Not a test: the rows of paged caches that the tokens of a request may still be read from."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.cache import PagedCaches
from dsv4_compile.sources import source_groups


def live_rows(caches: PagedCaches, request: int, length: int) -> dict[str, Tensor]:
    """Return the rows that a token at position `length` or later reads of the first `length` tokens of a request.

    Copies, by layer and cache: the window, raw states of open groups, and all entries and indexer keys.
    """
    rows: dict[str, Tensor] = {}
    for name, cache, slots in _slots(caches, request, length):
        rows[name] = cache.flatten(0, 1)[slots].clone()
    return rows


def set_rows(caches: PagedCaches, request: int, length: int, rows: dict[str, Tensor]) -> None:
    """Write what `live_rows` of other caches returned."""
    for name, cache, slots in _slots(caches, request, length):
        cache.flatten(0, 1)[slots] = rows[name]


def poison(caches: PagedCaches, lengths: list[int]) -> None:
    """Fill all rows with NaN that no token of `lengths` may still be read from."""
    saved = [(row, n, live_rows(caches, row, n)) for row, n in enumerate(lengths)]
    for layer in caches.layers:
        for tensor in layer.tensors().values():
            tensor.fill_(torch.nan)
    for row, length, rows in saved:
        set_rows(caches, row, length, rows)


def _slots(caches: PagedCaches, request: int, length: int) -> list[tuple[str, Tensor, Tensor]]:
    rows = []
    tables = {name: table[request].long() for name, table in caches.block_tables.tensors().items()}

    def lookup(group: str, places: range, page: int) -> Tensor:
        at = torch.tensor(list(places), dtype=torch.int64)
        return tables[group][at // page] * page + at % page

    for i, layer in enumerate(caches.layers):
        ratio = caches.config.ratio(i)
        begin = max(0, length - caches.config.sliding_window + 1)
        rows.append((f"{i}.window", layer.window, lookup("window", range(begin, length), layout.WINDOW_BLOCK)))
        if ratio == 1:
            continue
        entries = range(length // ratio)
        reach = (layout.overlap_factor(ratio) - 1) * ratio
        states = range(max(0, length // ratio * ratio - reach), length)
        for group in source_groups(ratio):
            cache, places = getattr(layer.sources[0], group.role), entries if group.row_tokens == ratio else states
            rows.append((f"{i}.{group.name}", cache, lookup(group.name, places, group.page_rows)))
    return rows
