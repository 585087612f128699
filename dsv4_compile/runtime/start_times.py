"""Seconds of this process's start by kind of work: each second counts once, for the innermost block.

with spending("capture"):
    graphs.capture(call, "a step")
print(start_table(spent()))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

KINDS: Mapping[str, str] = {
    "read": "weights from files to the device",
    "place": "parameters, caches and conversion",
    "trace": "Dynamo and its guards",
    "compile": "AOTAutograd and Inductor",
    "build": "kernels that compiling waited for, or that a first launch built",
    "capture": "recording of graphs",
    "run": "calls that warm up",
}
"""Kinds of work, in the order of a start, and their meaning."""
_lock = threading.Lock()
_spent: dict[str, float] = {}
_inner: ContextVar[list[float] | None] = ContextVar("dsv4_spending", default=None)


@contextmanager
def spending(kind: str) -> Iterator[None]:
    """Count the seconds of the block as `kind`, without those of blocks inside it."""
    outer, inner, begin = _inner.get(), [0.0], time.perf_counter()
    token = _inner.set(inner)
    try:
        yield
    finally:
        _inner.reset(token)
        took = time.perf_counter() - begin
        if outer is not None:
            outer[0] += took
        count(kind, took - inner[0])


def count(kind: str, seconds: float, *, out_of: str = "") -> None:
    """Add seconds to `kind`, and take them from the kind `out_of` that had counted them."""
    with _lock:
        _spent[kind] = _spent.get(kind, 0.0) + seconds
        if out_of:
            _spent[out_of] = _spent.get(out_of, 0.0) - seconds


def spent() -> dict[str, float]:
    """Return the seconds so far by kind, in the order of `KINDS`."""
    with _lock:
        return {kind: _spent.get(kind, 0.0) for kind in KINDS}


def start_table(seconds: Mapping[str, float]) -> str:
    """Return a line for each kind of work."""
    rows = [f"{kind:<8}{seconds.get(kind, 0.0):>8.1f} s  {meaning}" for kind, meaning in KINDS.items()]
    return "\n".join([*rows, f"{'total':<8}{sum(seconds.values()):>8.1f} s"])


def start_line(seconds: Mapping[str, float]) -> str:
    """Return the kinds of work that took a tenth of a second, in one line."""
    return ", ".join(f"{kind} {seconds[kind]:.1f} s" for kind in KINDS if seconds.get(kind, 0.0) >= 0.1)
