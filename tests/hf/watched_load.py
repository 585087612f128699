"""Not a test: a watch over a call that reads a folder: how it ended, what it opened, time and memory that it took."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_compile import DSV4Error

SECONDS, MEGABYTES, LETTERS = 5.0, 500, 4000
"""Limits of one call, and of its message."""


@dataclass
class Outcome:
    """How a call ended: "ok", the code of an error, or the raw exception; with its side effects."""

    ended: str
    seconds: float = 0.0
    megabytes: float = 0.0
    outside: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Sentences on broken limits and rules; empty for a clean run."""
        faults = list(self.outside)
        if not (self.ended == "ok" or self.ended[0] in "EW"):
            faults.append(self.ended)
        if self.seconds > SECONDS:
            faults.append(f"{self.seconds:.1f} s")
        if self.megabytes > MEGABYTES:
            faults.append(f"{self.megabytes:.0f} MB")
        return faults


class TooSlow(BaseException):
    """Raised by the alarm of a call that takes too long."""


class Watch:
    """Audit hook that notes files opened outside of a folder, connections, processes and libraries."""

    EVENTS = (
        "socket.connect",
        "socket.getaddrinfo",
        "socket.bind",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "ctypes.dlopen",
    )
    _installed: Watch | None = None

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outside: list[str] = []
        places = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.base_prefix, str(Path.cwd())}
        self._allowed = (*(os.path.realpath(place) for place in places), "/proc/meminfo", "/dev/null", "/proc/self/")

    @classmethod
    def installed(cls) -> Watch:
        """Return the one hook of this process: a hook cannot be removed."""
        if cls._installed is None:
            cls._installed = cls()
            sys.addaudithook(cls._installed._audit)
        return cls._installed

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in self.EVENTS:
            self.outside.append(f"{event} {str(arguments)[:200]}")
        elif event == "import" and any(str(self.folder) in str(each) for each in arguments[1:3]):
            self.outside.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            inside = path.startswith(str(self.folder)) and not path.endswith(".py")
            if not inside and not path.startswith(self._allowed):
                self.outside.append(f"open {path}")

    @contextmanager
    def _armed(self, folder: Path) -> Iterator[None]:
        def late(*_: Any) -> None:
            raise TooSlow

        self.folder, self.outside = Path(os.path.realpath(folder)), []
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 12 * SECONDS)  # of the clock: a machine may be busy
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self.folder = None

    def run(self, folder: Path, call: Callable[[], Any]) -> Outcome:
        """Call, and return how it ended. A busy machine may take the time of others: seconds are of this process."""
        forget_peak()
        before, started = memory("VmRSS"), time.process_time()
        try:
            with self._armed(folder):
                call()
            ended = "ok"
        except DSV4Error as fault:
            ended = fault.code
            if len(str(fault)) > LETTERS or not all(line.isprintable() for line in str(fault).split("\n")):
                ended = f"a message of {len(str(fault))} characters: {str(fault)[:200]!r}"
        except TooSlow:
            ended = "timeout"
        except BaseException as fault:
            ended = f"raw {type(fault).__name__}: {str(fault)[:200]}"
        seconds = time.process_time() - started
        if (folder / "executed").exists():
            self.outside.append("executed a module of the folder")
        return Outcome(ended, seconds, memory("VmHWM") - before, self.outside)


def forget_peak() -> None:
    """Let the kernel count the peak of this process's memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> float:
    """Return a size of this process from the kernel, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{name}:"))
