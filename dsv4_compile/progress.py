"""Progress of long work such as compilation, reported to a terminal or to listeners.

    with progress.stage("compile", total=2) as work:
        work.note("prefill graph")
        model(prompt)
        work.advance("decode graph")
        model(token)
        work.advance()

On a terminal, stderr shows one line that is removed at the end; otherwise nothing is printed. A server passes a
function: `with progress.listen(callback):` calls it with an `Event` at each step. `lines(stream)` makes one for logs.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TextIO

from .errors import printable

_REDRAW_SECONDS = 0.5
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(frozen=True, slots=True)
class Event:
    """State of a stage. `total` and `eta` (seconds left) are None if the amount of work is unknown."""

    stage: str
    done: int
    total: int | None
    note: str
    elapsed: float
    eta: float | None
    finished: bool = False

    def __str__(self) -> str:
        count = f" {self.done}/{self.total}" if self.total is not None else f" {self.done}" if self.done else ""
        note = f" {self.note}" if self.note else ""
        left = f", about {_duration(self.eta)} left" if self.eta is not None and not self.finished else ""
        return printable(f"{self.stage}{count}{note}  {_duration(self.elapsed)}{left}")


Listener = Callable[[Event], None]

_listeners: ContextVar[tuple[Listener, ...] | None] = ContextVar("dsv4_progress", default=None)


@dataclass(slots=True)
class Stage:
    """Work in progress, which reports from the thread that does it."""

    name: str
    total: int | None
    _send: Listener
    _started: float = field(default_factory=time.monotonic)
    _done: int = 0
    _note: str = ""

    def note(self, text: str) -> None:
        """Report what is being done now."""
        self._note = text
        self._send(self.event())

    def advance(self, text: str = "", steps: int = 1) -> None:
        """Count `steps` as done, and report `text` as the next one."""
        self._done += steps
        self.note(text)

    def event(self, *, finished: bool = False) -> Event:
        """Return the current state."""
        elapsed = time.monotonic() - self._started
        eta = None
        if self.total is not None and 0 < self._done <= self.total:
            eta = elapsed / self._done * (self.total - self._done)
        return Event(self.name, self._done, self.total, self._note, elapsed, eta, finished)


@contextmanager
def stage(name: str, total: int | None = None) -> Iterator[Stage]:
    """Report the work of the block as `name`, with `total` steps, or None if the number is unknown."""
    listeners = _listeners.get()
    line = _Line(sys.stderr) if listeners is None and sys.stderr.isatty() else None

    def send(event: Event) -> None:
        for listener in listeners or ():
            listener(event)
        if line is not None:
            line.show(event)

    work = Stage(name, total, send)
    send(work.event())
    if line is not None:
        line.start(work.event)
    try:
        yield work
    finally:
        if line is not None:
            line.stop()
        for listener in listeners or ():
            listener(work.event(finished=True))


@contextmanager
def listen(listener: Listener | None) -> Iterator[None]:
    """Send events of the block to `listener` instead of the terminal, after those of an outer `listen`.

    None silences the block. Listeners run in the thread that does the work, so they must be fast.
    """
    token = _listeners.set(() if listener is None else (*(_listeners.get() or ()), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def lines(stream: TextIO) -> Listener:
    """Return a listener that writes a line to `stream` whenever the stage or its note changes."""
    last: tuple[str, str] | None = None

    def show(event: Event) -> None:
        nonlocal last
        if event.finished:
            last = None
        elif event.note and last != (event.stage, event.note):
            last = event.stage, event.note
            stream.write(f"{event}\n")
            stream.flush()

    return show


class _Line:
    """One line of a terminal, redrawn by a separate thread while the work blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, now: Callable[[], Event]) -> None:
        def redraw() -> None:
            while not self._stopped.wait(_REDRAW_SECONDS):
                self.show(now())

        self._thread = threading.Thread(target=redraw, name="dsv4-progress", daemon=True)
        self._thread.start()

    def show(self, event: Event) -> None:
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"{_CLEAR_LINE}{str(event)[: columns - 1]}")
        self._stream.flush()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._stream.write(_CLEAR_LINE)
        self._stream.flush()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
