"""A watchdog of split models over symmetric memory: ends a process if its step waits for a rank that is gone.

Kernels over symmetric memory spin until their peers come; a host that waits for them cannot be interrupted. A daemon
thread writes this rank's beat to the store of the default group and reads those of the others; a second one judges, and
never blocks. A rank on this host is gone when its process has ended, any other when its beat stops. Time is counted in
own ticks, so a pause of all processes is one tick. A step is pending while its host runs it or its event has not come;
the event is queried only once a rank is gone, since a query may spoil a capture elsewhere in the process.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from ..errors import DSV4Error, check, error
from .collectives import first_object
from .peers import Processes
from .ranks import Ranks

TIMEOUT = 10.0
"""Seconds that a rank must be gone before a pending step ends the process."""
STATUS = 70
"""Exit status of a process that waited for a rank that is gone."""
_INTERVAL = 1.0
"""Seconds between two beats, and between two looks at those of the others."""
PATIENCE = 3.0
"""Seconds for an answer of the store, the device or a stream; any of them may hang."""
LEFT, _BEAT = "left", "beat"
_OUTSIDE = -1
"""Number of the process that holds the store and has no rank in the group, such as torchrun's agent."""
_log = logging.getLogger("dsv4_compile.parallel")


class Leaves(Protocol):
    """A watch over the ranks of a group, which ends with the group."""

    def leave(self) -> None:
        """Tell the other ranks that this one leaves, and end the threads."""

    def group_exists(self) -> bool:
        """Return whether the group is still the one that this was made for."""


registered: dict[tuple[str, str], Leaves] = {}
"""Watches by kind and name of their group."""


class Work(Protocol):
    """The newest work of this rank on its device."""

    def record(self) -> None:
        """Mark the work launched so far; never waits."""

    def done(self) -> bool:
        """Return whether the marked work has ended; never waits for it."""


class DeviceWork:
    """Work of a GPU, marked by one event that replaces the one before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event: torch.cuda.Event | None = None

    def record(self) -> None:
        """Mark the work launched so far on the current stream, unless it is being captured."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self.event is None:
            self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(self.device))

    def done(self) -> bool:
        """Return whether the marked work has ended."""
        if self.event is None:
            return True
        with torch.cuda.device(self.device):  # a new thread would begin with GPU 0
            return bool(self.event.query())


class Beats:
    """The thread that writes this rank's beats to a store and reads those of the others.

    Attributes:
        read: by rank, the newest text "beat NUMBER CALLS" or "left NUMBER CALLS"; CALLS is the result of `calls`.
        rounds: number of rounds that the store has answered.
        lost: whether the connection to the store is closed.
        answered: when the store answered last, by the monotonic clock.
        heard: by rank, when it wrote its newest text.
    """

    def __init__(self, store: Any, ranks: Ranks, interval: float, calls: Callable[[], object]) -> None:
        self.store, self.ranks, self.interval, self.calls = store, ranks, interval, calls
        self.read: dict[int, str] = {}
        self.rounds, self.lost = 0, False
        self.answered, self.heard = time.monotonic(), dict[int, float]()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dsv4-beats", daemon=True)
        self.failed = False

    def _run(self) -> None:
        number = 0
        while not self.lost:
            last = self.stop.is_set()
            self._round(f"{LEFT if last else _BEAT} {number} {self.calls()}")
            if last:
                break
            number += 1
            self.stop.wait(self.interval)
        self.store = None

    def _round(self, text: str) -> None:
        distributed: Any = torch.distributed
        try:
            self.store.set(str(self.ranks.rank), text)
            others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
            # A get would wait for the key of a rank that has not begun.
            begun = [rank for rank in others if rank in self.read or self.store.check([str(rank)])]
            texts = self.store.multi_get([str(rank) for rank in begun]) if begun else []
            read = {rank: text.decode() for rank, text in zip(begun, texts, strict=True)}
            self.answered = time.monotonic()
            self.heard |= {rank: self.answered for rank in begun if read[rank] != self.read.get(rank)}
            self.read = read
            self.rounds += 1
        except distributed.DistNetworkError as fault:
            self.lost = True
            _log.info("group %s: the store is closed: %s", self.ranks.name, fault)
        except Exception:
            if not self.failed:
                _log.warning("group %s: no beat, trying again", self.ranks.name, exc_info=True)
            self.failed = True


class HostCalls(ABC):
    """Counts calls that the host makes, between `enter` and `exit`, for all copies of a model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HostCalls:
        return self  # a copy of a model is on the same ranks

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call that the host makes in the block."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    @abstractmethod
    def enter(self) -> None:
        """Begin a call."""

    @abstractmethod
    def exit(self) -> None:
        """End a call."""


class Watchdog(HostCalls):
    """Watches the other ranks of a group while this one has a call pending.

    A call is a part of a step that all ranks run through in one order: a comparison, or a forward.

    Args:
        ranks: the group. All its ranks make the watchdog together.
        processes: the processes of the ranks.
        work: marks the end of each call.
        timeout: seconds that a rank must be gone before a pending call ends the process.
        interval: seconds between two beats.
    """

    def __init__(
        self, ranks: Ranks, processes: Processes, work: Work, timeout: float, interval: float = _INTERVAL
    ) -> None:
        self.ranks, self.processes, self.work = ranks, processes, work
        self.timeout, self.interval = timeout, interval
        self.begun = self.ended = 0
        self.holder = holder_of_store(ranks)
        self._group = id(ranks.group)
        self._beats = Beats(new_store("dsv4_watchdog", ranks), ranks, interval, lambda: self.ended)
        self._judge = threading.Thread(target=self._run, name="dsv4-watchdog", daemon=True)
        self._seen: tuple[Any, ...] = ()
        self._before: dict[int, str] = {}
        self._rounds, self._idle = 0, -1
        self._missed: dict[int, int] = {}
        self._failed = False

    def enter(self) -> None:
        """Begin a call; the first one starts the threads."""
        self.begun += 1
        if self._judge.ident is None:
            self._judge.start()
            self._beats.thread.start()

    def exit(self) -> None:
        """End a call on the host; its work may still be pending on the device."""
        with suppress(RuntimeError):  # a device that has failed tells the caller so itself
            self.work.record()
        self.ended = self.begun

    def group_exists(self) -> bool:
        """Return whether the group is still the one that this was made for."""
        try:
            return id(self.ranks.group) == self._group
        except (RuntimeError, ValueError):
            return False

    def leave(self) -> None:
        """Tell the other ranks that this one leaves, and end the threads.

        A thread tells them, so a fork, which has no threads and no rank, leaves in silence.
        """
        self._beats.stop.set()
        for thread in (self._beats.thread, self._judge):
            if thread.ident is not None:
                thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._beats.stop.wait(self.interval):
            try:
                if not self.group_exists():
                    self._beats.stop.set()
                elif overdue := self._look():
                    _end(self.fault(overdue))
            except Exception:
                if not self._failed:
                    _log.exception("group %s: the watchdog has failed, trying again", self.ranks.name)
                self._failed = True

    def _look(self) -> list[int]:
        """Return the ranks that a pending call waits for in vain, after one more tick."""
        now, beats = (self.begun, self.ended), self._beats
        moved, self._seen = now != self._seen, now
        read, rounds = beats.read, beats.rounds
        answered, self._rounds = rounds != self._rounds, rounds
        before, self._before = self._before, read
        if moved:
            self._missed.clear()
            return []
        gone = frozenset(self.processes.gone())
        for rank in (*range(self.ranks.size), _OUTSIDE):
            if rank != self.ranks.rank:
                alive = self._alive(rank, gone, answered, read.get(rank, ""), before.get(rank, ""))
                if alive is not None:
                    self._missed[rank] = 0 if alive else self._missed.get(rank, 0) + 1
        limit = max(2, round(self.timeout / self.interval))
        overdue = [rank for rank, missed in self._missed.items() if missed >= limit]
        return overdue if overdue and self._pending(overdue) else []

    def _alive(self, rank: int, gone: frozenset[int], answered: bool, text: str, before: str) -> bool | None:
        """Return whether `rank` has given a sign of life in this tick, None if nothing can be known."""
        if rank == _OUTSIDE:
            all_visible = len(self.processes.visible) == self.ranks.size
            return answered or all_visible or self.holder != _OUTSIDE
        if text.startswith(LEFT):
            return False
        if rank == self.holder and self._beats.lost:
            return False
        if rank in self.processes.visible:
            return rank not in gone
        if not answered:
            return False if rank == self.holder else None
        return text != before if text else None

    def _pending(self, overdue: Sequence[int]) -> bool:
        """Return whether a call that a rank of `overdue` has not finished is pending."""
        if self.begun > self.ended and any(self.begun > self._calls(rank) for rank in overdue):
            return True
        ended = self.ended
        if self._idle == ended:
            return False
        done = _within(PATIENCE, self.work.done)
        if done:
            self._idle = ended
        return not done and self.ended == ended

    def _calls(self, rank: int) -> float:
        """Return the number of calls that `rank` had finished when it left, -1 if it did not say that it left."""
        text = self._beats.read.get(rank, "")
        if text.startswith(LEFT):
            return int(text.split()[2])
        return float("inf") if self._closed(rank) else -1

    def _closed(self, rank: int) -> bool:
        """Return whether `rank` has closed the store that it held while its process runs."""
        return rank == self.holder and self._beats.lost and rank in self.processes.visible and not self._ended(rank)

    def _ended(self, rank: int) -> bool:
        return rank in self.processes.gone()

    def fault(self, overdue: Sequence[int]) -> DSV4Error:
        """Return E706 for the ranks `overdue`."""
        return gone_error(self.ranks, [f"{self._name(rank)} {self._how(rank)}" for rank in overdue])

    def _name(self, rank: int) -> str:
        if rank == _OUTSIDE:
            return "the process that held the group's store"
        return self.processes.describe(rank) + (", which held the group's store," if rank == self.holder else "")

    def _how(self, rank: int) -> str:
        if self._beats.read.get(rank, "").startswith(LEFT) or self._closed(rank):
            return "has left: it destroyed the group, or its interpreter ended"
        if rank in self.processes.visible and self._ended(rank):
            return "has ended without leaving: it was killed or crashed"
        return f"has given no sign of life for {self.timeout:.0f} s"


def gone_error(ranks: Ranks, found: Sequence[str]) -> DSV4Error:
    """Return E706 on one of `ranks` for texts about ranks that are gone."""
    return error(
        "E706",
        got=f"rank {ranks.rank} of group {ranks.name} waits in a step: {'; '.join(found)}",
        why=f"kernels wait for that rank without end and cannot be stopped, so the process ends with status {STATUS}",
    )


def watch(ranks: Ranks, processes: Processes, work: Work, timeout: float, interval: float = _INTERVAL) -> Watchdog:
    """Return the watchdog of the group, a new one if it has none. All ranks of the group call this together."""
    check(timeout > 0, "E201", got=f"rank_timeout={timeout}", fix="pass a number of seconds above 0")
    key = "watchdog", ranks.name
    watchdog = registered.get(key)
    if not isinstance(watchdog, Watchdog) or not watchdog.group_exists():
        if watchdog is not None:
            watchdog.leave()
        watchdog = registered[key] = Watchdog(ranks, processes, work, timeout, interval)
    watchdog.timeout = timeout
    return watchdog


def leave(name: str | None = None) -> None:
    """Leave the group `name`, or all: their ranks are told, and the threads end."""
    for key in [key for key in registered if name in (None, key[1])]:
        registered.pop(key).leave()


atexit.register(leave)


def new_store(name: str, ranks: Ranks) -> Any:
    """Return a connection to the store of the default group, with keys that no earlier group has used."""
    from .._compat import default_store

    distributed: Any = torch.distributed
    # torch holds the other connection while it waits for a key.
    store = distributed.PrefixStore(f"{name}/{first_object(uuid.uuid4().hex, ranks)}", default_store().clone())
    store.set_timeout(datetime.timedelta(seconds=PATIENCE))
    return store


def holder_of_store(ranks: Ranks) -> int:
    """Return the rank that holds the store of the default group, as torch's launchers set it up."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _OUTSIDE
    members = torch.distributed.get_process_group_ranks(ranks.group)
    return members.index(0) if 0 in members else _OUTSIDE


def _within(seconds: float, call: Callable[[], bool]) -> bool:
    """Return what `call` returns, False if it takes longer, True if it fails: then the host fails by itself too."""
    results: list[bool] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception:
            _log.warning("a rank is gone, and the device or stdout fails", exc_info=True)
            results.append(True)

    thread = threading.Thread(target=run, name="dsv4-watchdog-asks", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(results and results[0])


def _end(fault: DSV4Error) -> None:
    """End the process with the text of `fault` on stderr."""
    os.write(2, f"\n{fault}\n".encode())  # takes no lock of a stream: other threads may hold it
    _within(PATIENCE, lambda: sys.stdout is None or sys.stdout.flush() is None)
    os._exit(STATUS)
