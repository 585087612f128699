"""Runs parts of a long benchmark: an error or a deadline ends one of them, not the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .record import ROOT, Record, now, write_json

_SOONEST = 0.05
"""Seconds until an alarm, which comes when its block has begun."""


class Parts:
    """Runs parts of the benchmark within a deadline, and writes what they measured.

    Attributes:
        record: what is written as JSON to the folder `out`; it has "commit", "errors" and "rows".
        failed: whether a part has raised an error. `say` prints a line.
    """

    def __init__(self, record: Record, out: Path | None, seconds: float, say: Callable[[str], None]) -> None:
        self.record, self.failed = record, False
        self._out, self._say = out, say
        self._end = time.monotonic() + seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Print an error of the block instead of raising it, TimeoutError where no time is left for it."""
        begin = time.monotonic()
        self._say(f"[{self._end - begin:5.0f} s left] {name}")
        try:
            with _alarm(self._end - begin):
                yield
        except Exception as fault:
            self.failed = True
            text = f"{type(fault).__name__}: {fault}".replace(f"{ROOT}/", "").strip()[:600]
            self._say(f"{name}: {text}")
            self.record["errors"].append({"part": name, "error": text})
            self._write()

    def add(self, row: Record) -> None:
        """Print a row, and write the record with it."""
        row |= {"date": now(), "commit": self.record["commit"]}
        self.record["rows"].append(row)
        shown = {name: value for name, value in row.items() if name not in ("date", "commit", "kernels")}
        self._say("  " + "  ".join(f"{name} {value}" for name, value in shown.items()))
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            write_json(self.record, self._out)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after these seconds, when the interpreter runs next."""

    def stop(*_: Any) -> None:
        raise TimeoutError("the time of the run is over")

    before = signal.signal(signal.SIGALRM, stop)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(_SOONEST, seconds))
    begin = time.monotonic()
    try:
        yield
    finally:
        left = max(_SOONEST, outer - (time.monotonic() - begin)) if outer else 0.0
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
