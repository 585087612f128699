"""How often graphs were captured and replayed, compiled ones and those of a runner: for tests, reports and the curious.

with dsv4_compile.runtime.counting() as counts:
    model.generate(...)
print(counts)  # Counts(captures=1, replays=61, compiled=3)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Captures, replays, and calls of a graph with `dsv4.cudagraph="full"` that ran compiled."""

    captures: int = 0
    replays: int = 0
    compiled: int = 0


@dataclass(slots=True)
class Statistics:
    """What a runner has done: captures, replays, and steps that ran without a graph."""

    captures: int = 0
    replays: int = 0
    uncaptured: int = 0


_open: ContextVar[tuple[Counts, ...]] = ContextVar("dsv4_counts", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """Count inside the block."""
    counts = Counts()
    token = _open.set((*_open.get(), counts))
    try:
        yield counts
    finally:
        _open.reset(token)


def count(what: str) -> None:
    """Add one to `what` of every open counter."""
    for counts in _open.get():
        setattr(counts, what, getattr(counts, what) + 1)
