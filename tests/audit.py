"""Events of Python while a block runs: imported modules, opened files, started processes, libraries and sockets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WATCHED = ("import", "open", "ctypes.dlopen", "exec", "compile")
_BEGINNINGS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "socket.", "pty.")
_lists: list[list[tuple[str, Any]]] = []
_installed: list[bool] = []


def _hook(event: str, args: Any) -> None:
    if _lists and (event in _WATCHED or event.startswith(_BEGINNINGS)):
        for events in _lists:
            events.append((event, args[0] if args else None))


@contextmanager
def watched() -> Iterator[list[tuple[str, Any]]]:
    """Yield a growing list of events, each with its first argument: the name of a module, file or program."""
    if not _installed:
        sys.addaudithook(_hook)  # for good: Python removes none
        _installed.append(True)
    events: list[tuple[str, Any]] = []
    _lists.append(events)
    try:
        yield events
    finally:
        _lists.remove(events)
