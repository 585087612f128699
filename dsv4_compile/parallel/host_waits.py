"""Waits of the host for other ranks, in groups of gloo: who will not come, and an end of the wait.

A collective of gloo ends at once when a peer's process ends, but waits for the timeout of the group when the peer is
stopped, or has left the call with an error and lives on. Each rank therefore tells the store of the default group which
calls it has finished and which it left, and a daemon thread looks, while a call is pending, for ranks that will not
come. It then closes the connections to the others, and the collective fails: gloo has nothing else to end it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..errors import DSV4Error, check, fail
from . import watchdog
from .peers import meet
from .ranks import Ranks

INTERVAL = 0.5
"""Seconds between two beats, and between two looks at those of the others."""
_GRACE = 2
"""Looks after which a rank that has left or ended does not come; the collective may fail by itself before."""
SILENCE = 2.0
"""Seconds without a beat after which a rank of another host explains a collective that failed."""
_ESTABLISHED = "01"
"""State of a connection in /proc/net/tcp."""
_log = logging.getLogger("dsv4_compile.parallel")


class HostWaits(watchdog.HostCalls):
    """Counts the calls that wait for other ranks, and ends one that waits in vain.

    Every rank makes the same calls in the same order: collectives of objects, and forwards.

    Args:
        ranks: the group, of gloo. All its ranks make this together.
        timeout: seconds that a rank must be stopped before a pending call ends.
        interval: seconds between two beats.
    """

    def __init__(self, ranks: Ranks, timeout: float, interval: float = INTERVAL) -> None:
        self.ranks, self.timeout, self.interval = ranks, timeout, interval
        self.processes = meet(ranks)
        self.begun = self.ended = 0
        self.left: tuple[int, str] | None = None
        self._depth = 0
        self._group = id(ranks.group)
        self._holder = watchdog.holder_of_store(ranks)
        self._beats = watchdog.Beats(watchdog.new_store("dsv4_waits", ranks), ranks, interval, self._state)
        self._looks: dict[int, int] = {}
        self._judge = threading.Thread(target=self._run, name="dsv4-host-waits", daemon=True)
        self._beats.thread.start()
        self._judge.start()
        self.processes.lookout = self

    def enter(self) -> None:
        """Begin a call. Raises E703 if a rank is still in one that this rank left with an error."""
        self._depth += 1
        if self._depth > 1:
            return
        if self.left is not None:
            try:
                self._rejoin()
            except BaseException:
                self._depth = 0
                raise
        self.begun += 1

    def exit(self) -> None:
        """End a call."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.ended = self.begun

    def leave_call(self, fault: BaseException) -> None:
        """Tell the others that this rank does not come to the call it is in, or to the next, because of `fault`."""
        told = f"[{fault.code}] {fault.got}" if isinstance(fault, DSV4Error) else str(fault)
        text = f"{type(fault).__name__}: {told}".splitlines()[0]
        self.left = self.begun + (not self._depth), f"raised {text}"

    def reasons(self) -> dict[int, str]:
        """Return why ranks do not come to the pending call, by rank, as they have said."""
        return {rank: why for rank in self._others() if (why := self._why(rank))}

    def behind(self) -> dict[int, str]:
        """Return the ranks that have not come to the pending call, with the number of calls that they have made."""
        begun = {rank: self._numbers(rank)[1] for rank in self._others() if self._beats.read.get(rank)}
        return {
            rank: f"has not come to call {self.begun}: it has begun {number}"
            for rank, number in begun.items()
            if number < self.begun
        }

    def silent(self) -> dict[int, str]:
        """Return why ranks of other hosts, whose processes cannot be seen, are not heard either."""
        now, beats = time.monotonic(), self._beats
        away = [rank for rank in self._others() if rank not in self.processes.visible]
        if beats.lost or now - beats.answered > SILENCE:
            why = "is not heard: the store of the group is gone, or no network leads to it"
            return dict.fromkeys(away, why)
        ages = {rank: now - beats.heard.get(rank, now) for rank in away}
        return {
            rank: f"has been silent for {age:.0f} s: its process has ended, or its host or the network is down"
            for rank, age in ages.items()
            if age > SILENCE
        }

    def ahead(self) -> list[int]:
        """Return the ranks that have begun a call before this one."""
        return [rank for rank in self._others() if self._numbers(rank)[1] > self.begun]

    def leave(self) -> None:
        """Tell the other ranks that this one leaves the group, and end the threads."""
        self._beats.stop.set()
        for thread in (self._beats.thread, self._judge):
            if thread is not threading.current_thread():
                thread.join(watchdog.PATIENCE)
        self.processes.lookout = None

    def group_exists(self) -> bool:
        """Return whether the group is still the one that this was made for."""
        try:
            return id(self.ranks.group) == self._group
        except (RuntimeError, ValueError):
            return False

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]

    def _state(self) -> str:
        number, why = self.left or (0, "")
        return f"{self.ended} {self.begun} {number} {why}"

    def _numbers(self, rank: int) -> tuple[int, int, int, str]:
        """Return the calls that `rank` has finished and begun, and which it left and why, 0 and "" for none."""
        words = self._beats.read.get(rank, "").split(" ", 5)
        if len(words) < 5:
            return 0, 0, 0, ""
        return int(words[2]), int(words[3]), int(words[4]), words[5] if len(words) > 5 else ""

    def _why(self, rank: int) -> str:
        """Return why `rank` will not come to the newest call, "" if nothing says that it will not."""
        text = self._beats.read.get(rank, "")
        ended, _, left, why = self._numbers(rank)
        if left >= max(1, self.begun):
            return why
        if text.startswith(watchdog.LEFT) and ended < self.begun:
            return "has left: it destroyed the group, or its interpreter ended"
        if rank == self._holder and self._beats.lost:
            return "has closed the store of the group: it destroyed the group, or its interpreter ended"
        return ""

    def _rejoin(self) -> None:
        """Wait until all others have left or finished the call that this rank left. Raises E703 if one is in it."""
        assert self.left is not None
        number, why = self.left
        deadline = time.monotonic() + _GRACE * 4 * self.interval + 1.0
        while True:
            numbers = {rank: self._numbers(rank) for rank in self._others()}
            waiting = [rank for rank, (ended, _, left, _) in numbers.items() if max(ended, left) < number]
            if not waiting:
                self.left = None
                self.begun = self.ended = max(number, self.begun)
                return
            if time.monotonic() > deadline or self._beats.lost:
                names = ", ".join(f"rank {rank}" for rank in waiting)
                fail(
                    "E703",
                    got=f"on rank {self.ranks.rank} of {self.ranks.size}: this rank {why}, in call {number}",
                    why=f"{names} may wait in that call",
                )
            time.sleep(self.interval / 10)

    def _run(self) -> None:
        seen = -1
        while not self._beats.stop.wait(self.interval):
            if not self.group_exists():
                self._beats.stop.set()
                break
            pending = self.begun if self.begun > self.ended else -1
            if pending != seen or pending < 0:
                self._looks.clear()
                seen = pending
                continue
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        """End the pending call if a rank has been gone for some looks."""
        absent = dict(self.reasons())
        absent.update(dict.fromkeys(self.processes.gone(), ""))
        stopped = set(self.processes.stopped())
        for rank in self._others():
            missing = rank in absent or rank in stopped
            self._looks[rank] = self._looks.get(rank, 0) + 1 if missing else 0
        patience = max(_GRACE, round(self.timeout / self.interval))
        for rank, looks in self._looks.items():
            if looks >= (_GRACE if rank in absent else patience):
                pids = [pid for other, (pid, _) in self.processes.visible.items() if other != self.ranks.rank]
                closed = close_connections(pids, _store_port())
                _log.info("group %s: rank %d does not come, %d connections closed", self.ranks.name, rank, closed)
                self._looks.clear()
                return


def watch(ranks: Ranks, timeout: float) -> HostWaits | None:
    """Return the `HostWaits` of a group of gloo, the same for all its models; None for other backends."""
    number = isinstance(timeout, (int, float)) and timeout > 0
    check(number, "E201", got=f"rank_timeout={timeout!r}", rule="rank_timeout is a number of seconds above 0")
    if ranks.size == 1 or str(torch.distributed.get_backend(ranks.group)) != "gloo":
        return None
    key = "waits", ranks.name
    known = watchdog.registered.get(key)
    if not isinstance(known, HostWaits) or not known.group_exists():
        if known is not None:
            known.leave()
        known = watchdog.registered[key] = HostWaits(ranks, timeout)
    known.timeout = timeout
    return known


def close_connections(pids: Iterable[int], but_port: int = 0) -> int:
    """Shut down the TCP connections from this process to processes of this host; return their number.

    Args:
        but_port: a port; its connections stay.
    """
    rows = {
        words[9]: (words[1], words[2])
        for name in ("tcp", "tcp6")
        for words in map(str.split, _lines(Path("/proc/net") / name))
        if words[3] == _ESTABLISHED
    }
    theirs = {_ports(rows[inode]) for pid in pids for inode in _sockets(pid) if inode in rows}
    count = 0
    for inode, descriptor in _sockets("self").items():
        if inode not in rows:
            continue
        local, remote = _ports(rows[inode])
        if (remote, local) in theirs and but_port not in (local, remote):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []


def _ports(ends: tuple[str, str]) -> tuple[int, int]:
    """Return the local and the remote port of a row of /proc/net/tcp; processes of one host share all ports."""
    local, remote = (int(end.rpartition(":")[2], 16) for end in ends)
    return local, remote


def _sockets(pid: int | str) -> dict[str, int]:
    """Return the descriptors of the sockets of a process by inode."""
    descriptors = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    descriptors[target[8:-1]] = int(entry.name)
    return descriptors


def _store_port() -> int:
    """Return the port of the store of the default group, 0 if it has none."""
    from .._compat import default_store

    store: Any = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", 0))
