"""Bound on the memory of captures in one pool: those that were replayed least recently make room.

A pool returns no memory while it has a capture, so what an evicted capture held is room for the captures after it.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Evictable(Protocol):
    """A captured call: bytes of its outputs in the pool, of its inputs outside of it, and the time of its last replay.

    It is compared by identity, and may be freed at any time.
    """

    output_bytes: int
    input_bytes: int
    replayed: int

    def evict(self) -> None:
        """Free the capture with its inputs and outputs."""


class CaptureBudget:
    """Captures of a pool and the bytes that they hold. Callers hold the lock of the pool."""

    def __init__(self) -> None:
        self._captured: weakref.WeakSet[Evictable] = weakref.WeakSet()
        self._pool = 0
        self._most_outputs = 0  # bytes of outputs that the pool has room for

    def held(self) -> int:
        """Return the bytes of inputs and of the pool, without those that evicted or freed captures have left in it."""
        captured = list(self._captured)
        outputs, inputs = sum(c.output_bytes for c in captured), sum(c.input_bytes for c in captured)
        return self._pool - (self._most_outputs - outputs) + inputs

    def grown_by(self, pool_bytes: int) -> int:
        """Return by how much the pool has grown to `pool_bytes` since the last `add`."""
        return max(0, pool_bytes - self._pool)

    def add(self, capture: Evictable, pool_bytes: int) -> None:
        """Count a new capture, after which the pool has `pool_bytes`."""
        self._captured.add(capture)
        outputs = sum(c.output_bytes for c in list(self._captured))
        same_pool = pool_bytes == self._pool
        self._most_outputs = max(outputs, self._most_outputs) if same_pool else outputs
        self._pool = pool_bytes

    def to_evict(self, expected: int, limit: int, keep: Evictable | None = None) -> list[Evictable]:
        """Return captures to evict, the least recently replayed first, so that `expected` bytes more fit into `limit`.

        All of them where the pool alone is a quarter above the limit: the next capture then begins a new pool.
        """
        candidates = sorted((c for c in list(self._captured) if c is not keep), key=lambda c: c.replayed)
        if keep is None and self._pool > limit + limit // 4:
            return candidates
        excess, chosen = self.held() + expected - limit, []
        for capture in candidates:
            if excess <= 0:
                break
            chosen.append(capture)
            excess -= capture.output_bytes + capture.input_bytes
        return chosen

    def evict(self, captures: list[Evictable]) -> None:
        """Free these captures, which no replay uses any more."""
        for capture in captures:
            self._captured.discard(capture)
            capture.evict()
