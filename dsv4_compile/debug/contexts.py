"""Positions of the tokens that steps have written, by slot of the window cache.

All caches of all layers get a token in the same step, so the slots of one cache tell for all of them which tokens
before a query were never written.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..metadata import MetadataBuffers
from .staleness import CONTEXT, Batch, Reading, Stale
from .writes import Buffer


class Contexts:
    """Tokens that steps wrote to the pages of some buffers."""

    def __init__(self, buffers: MetadataBuffers) -> None:
        self._buffers = buffers
        self._position: dict[int, int] = {}

    def missing(self, reading: Reading, caches: list[Buffer], batch: Batch) -> Iterator[Stale]:
        """Find requests with a token that no step wrote, although steps wrote one before it."""
        if any(cache.last.serial > reading.since for cache in caches):
            self._position.clear()  # other code filled caches: what they hold now is unknown
        for request, start, end, length in batch.requests:
            before = length - (end - start)
            window = range(max(0, before - self._buffers.plan.sizes["window"] + 1), before)
            slots = self._slots(request, window)
            known = [p for p, slot in zip(window, slots, strict=True) if self._position.get(slot) == p]
            if known and known[-1] < before - 1 and caches:
                tokens = f"tokens {known[-1] + 1} to {before - 1} of request {request}, which no step wrote"
                yield reading.stale(caches[0], f"and all others lack {tokens}", CONTEXT)

    def wrote(self, batch: Batch) -> None:
        """Record the tokens of a step that has run."""
        for request, start, end, length in batch.requests:
            query = range(length - (end - start), length)
            written = zip(self._slots(request, query), query, strict=True)
            self._position |= {slot: position for slot, position in written if slot >= 0}

    def _slots(self, request: int, positions: range) -> list[int]:
        """Return the slots of positions; -1 where the table has no page."""
        size, table = self._buffers.window_block_size, self._buffers.tensors["window_block_table"]
        pages = table[request, [p // size for p in positions]].tolist() if positions else []
        return [page * size + p % size if page >= 0 else -1 for page, p in zip(pages, positions, strict=True)]
