"""Which implementation of which op has passed its tests on which GPU: `auto` chooses nothing else there.

Kernels are tested everywhere in the interpreter and compiled ahead of time, which says nothing of races, alignment or
a compiler's mistakes on the chip. So hardware is a test of its own. `proven.json` is its record, written by
`python tests/gpu/prove.py` on the machine that ran it; an implementation that is not in it can still be asked for by
name. A CPU needs no entry: all that runs there is tested on every change.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

RECORD = Path(__file__).with_name("proven.json")

_trusted: ContextVar[bool] = ContextVar("dsv4_trusted", default=False)


@functools.cache
def _rows() -> tuple[dict[str, str], ...]:
    return tuple(json.loads(RECORD.read_text(encoding="utf-8"))["proven"])


@functools.cache
def _entries() -> frozenset[tuple[str, str, str]]:
    return frozenset((row["impl"], row["op"], row["architecture"]) for row in _rows())


def tested_with(architecture: str) -> set[str]:
    """Versions of Triton that implementations have passed with on `architecture`."""
    return {row["triton"] for row in _rows() if row["architecture"] == architecture}


def is_proven(impl: str, op: str, architecture: str) -> bool:
    """Whether `impl` (`ir` or `triton`) of `op` has passed on `architecture`, a `_compat.device_architecture`."""
    return architecture == "cpu" or _trusted.get() or (impl, op, architecture) in _entries()


def trusting() -> bool:
    """Whether this runs inside `trust`."""
    return _trusted.get()


@contextmanager
def trust() -> Iterator[None]:
    """Count everything as proven inside the block: for the tests that are to prove it."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)
