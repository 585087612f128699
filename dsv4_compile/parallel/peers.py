"""The processes of all ranks, and E703: the names of those that a failed collective waited for.

Each rank writes its process to the store of the default group when it first meets the group, so that a rank that ends
before the first collective is named too. Collectives of this package run inside `naming`.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from ..errors import DSV4Error, check, error
from .ranks import Ranks

_EXITING = 0x4
"""Flag of the kernel for a process that is being ended."""
_COLLECTIVE = re.compile(
    r"gloo|nccl|processgroup|timed ?out|broken pipe|connection (?:closed|reset)|tcpstore",
    re.IGNORECASE,
)
"""First lines of the errors that collectives and stores raise."""
_TIMED_OUT = re.compile(r"timed ?out", re.IGNORECASE)
_NOTICED = "[E703]"
"""Text in the reason of a rank that left because of this error."""
_TRACED_STOP, _STOPPED = "t", "T"
"""States of a process that a debugger or a signal has stopped."""


class Lookout(Protocol):
    """Knows why ranks do not come, see `host_waits`."""

    def call(self) -> Any:
        """Return a context for a call that waits for other ranks."""

    def leave_call(self, fault: BaseException) -> None:
        """Tell the others that this rank has left the call with `fault`."""

    def reasons(self) -> Mapping[int, str]:
        """Return why ranks will not come to the pending call, by rank."""

    def behind(self) -> Mapping[int, str]:
        """Return the ranks that have not come to the pending call, with their finished calls."""

    def ahead(self) -> Sequence[int]:
        """Return the ranks that have begun a call before this one."""

    def silent(self) -> Mapping[int, str]:
        """Return why ranks of other hosts are not heard, by rank."""


def of_collective(fault: BaseException) -> bool:
    """Return whether `fault` is that of a collective, or of the store of a group."""
    if isinstance(fault, DSV4Error) or not isinstance(fault, RuntimeError):
        return False
    first = str(fault).partition("\n")[0]
    return type(fault).__module__.startswith("torch.distributed") or bool(_COLLECTIVE.search(first))


class Processes:
    """The processes of all ranks; shows which of this host have ended or are stopped.

    Args:
        patience: seconds that a process may need to disappear after its connections are closed.

    Attributes:
        places: by rank, name of its host and number of its process there.
        visible: by rank, number and beginning of the processes that are seen from here.
        followed: a `RunningBatch` of this rank that the others follow, so that they come to no other call.
    """

    def __init__(self, ranks: Ranks, patience: float = 5.0) -> None:
        self.ranks, self.patience = ranks, patience
        self.lookout: Lookout | None = None
        self.followed: object | None = None
        self._group = id(ranks.group) if ranks.size > 1 else 0
        mine = platform.node(), os.getpid(), _started(os.getpid())
        introduce(ranks)
        try:
            everyone = gather(mine, ranks)
        except RuntimeError as fault:
            if of_collective(fault):
                self._set([known or ("", 0, "") for known in _introduced(ranks)])
                self.fail(fault)
            raise
        self._set(everyone)

    def _set(self, everyone: list[tuple[str, int, str]]) -> None:
        self.places = [(host, pid) for host, pid, _ in everyone]
        node = platform.node()
        # Other containers number this process differently, or not at all.
        self.visible = {
            rank: (pid, started)
            for rank, (host, pid, started) in enumerate(everyone)
            if host == node and started and _started(pid) in ("", started)
        }

    def of_group(self) -> bool:
        """Return whether these are still the group's processes."""
        try:
            return self.ranks.size == 1 or id(self.ranks.group) == self._group
        except (RuntimeError, ValueError):
            return False

    def gone(self) -> list[int]:
        """Return the visible ranks with processes that have ended."""
        return [rank for rank, (pid, started) in self.visible.items() if _started(pid) != started]

    def stopped(self) -> list[int]:
        """Return the visible ranks with processes that a signal or a debugger has stopped."""
        return [rank for rank, (pid, _) in self.visible.items() if _state(pid) in (_STOPPED, _TRACED_STOP)]

    def describe(self, rank: int) -> str:
        """Return rank, process and host in words."""
        host, pid = self.places[rank]
        return f"rank {rank} (process {pid} on {host})"

    def _describe_from_here(self, rank: int) -> str:
        """Return rank and process in words, and the host if it is another one."""
        host, pid = self.places[rank]
        return f"rank {rank} (process {pid or 'unknown'})" if host in ("", platform.node()) else self.describe(rank)

    def reasons(self) -> dict[int, str]:
        """Return why ranks do not come, by rank: they have ended, are stopped, or have said so."""
        told = {} if self.lookout is None else {**self.lookout.silent(), **self.lookout.reasons()}
        told |= dict.fromkeys(self.stopped(), "is stopped, by a signal or a debugger")
        told |= {rank: f"ended ({told[rank]})" if rank in told else "ended" for rank in self.gone()}
        # A rank that only noticed the end of a peer is not the first.
        return {rank: why for rank, why in told.items() if _NOTICED not in why} or told

    def waited_for(self) -> dict[int, str]:
        """Return `reasons`, waiting a few seconds for the first one."""
        deadline = time.monotonic() + self.patience
        while True:
            reasons = self.reasons()
            # A rank of another host is known to be gone only by its silence, later than others notice it.
            known = len(self.visible) == self.ranks.size or any(_NOTICED not in why for why in reasons.values())
            if (reasons and known) or time.monotonic() > deadline:
                return reasons
            time.sleep(0.05)

    def check_free(self) -> None:
        """Raise E208 if the other ranks follow a `RunningBatch` of this one."""
        check(
            self.followed is None,
            "E208",
            got="a call of all ranks while the others follow a RunningBatch",
            why="they come to steps of the batch alone",
            fix="call batch.close() first, or pass the prompt to batch.submit",
        )

    def fail(self, fault: BaseException) -> NoReturn:
        """Raise E703 for a `fault` of a collective, with the ranks that it waited for."""
        first = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        reasons = self.waited_for()
        late = {rank: "has not come to the group yet" for rank, (_, pid) in enumerate(self.places) if not pid}
        if self.lookout is not None and (_TIMED_OUT.search(first) or not reasons):
            late |= self.lookout.behind()
        late = {rank: why for rank, why in late.items() if _NOTICED in reasons.get(rank, _NOTICED)}
        fix = ""
        if late or not reasons:
            reasons = late | {rank: why for rank, why in reasons.items() if _NOTICED not in why}
            fix = "make the same calls with the same inputs on every rank; see the errors of the other ranks"
        names = (f"{self._describe_from_here(rank)} {why}" for rank, why in reasons.items())
        seen = f"{len(self.visible)} of {self.ranks.size} ranks are seen from here, and none has ended"
        why = "; ".join(names) or seen
        failure = error("E703", got=f"on rank {self.ranks.rank} of {self.ranks.size}: {first}", why=why, fix=fix)
        if self.lookout is not None:
            self.lookout.leave_call(failure)
        raise failure from fault


_met: dict[str, Processes] = {}


def meet(ranks: Ranks) -> Processes:
    """Return the processes of the group's ranks. All ranks call this together the first time."""
    if ranks.size == 1:
        return Processes(ranks)
    known = _met.get(ranks.name)
    if known is None or not known.of_group():
        known = _met[ranks.name] = Processes(ranks)
    return known


def ranks_of(group: Any) -> Ranks | None:
    """Return the ranks of a process group that have met, the default group for None; None if they have not."""
    world: Any = torch.distributed.group.WORLD
    known = _met.get(str(getattr(world if group is None else group, "group_name", "")))
    return known.ranks if known is not None and known.of_group() else None


def known_processes(ranks: Ranks) -> Processes | None:
    """Return the processes of the group's ranks, None if they have not met."""
    known = _met.get(ranks.name)
    return known if known is not None and known.of_group() else None


@contextmanager
def naming(ranks: Ranks) -> Iterator[None]:
    """Wait for other ranks in the block; a collective that fails raises E703 with the ranks it waited for.

    Raises E208 while the other ranks follow a `RunningBatch`.
    """
    known = known_processes(ranks)
    if known is not None:
        known.check_free()
    lookout = None if known is None else known.lookout
    try:
        with nullcontext() if lookout is None else lookout.call():
            yield
    except RuntimeError as fault:
        if known is not None and of_collective(fault):
            known.fail(fault)
        raise


def gather(value: Any, ranks: Ranks) -> list[Any]:
    """Return the picklable `value` of every rank, in their order."""
    if ranks.size == 1:
        return [value]
    everyone: list[Any] = [None] * ranks.size
    torch.distributed.all_gather_object(everyone, value, group=ranks.group)
    return everyone


def introduce(ranks: Ranks) -> None:
    """Write this rank's process to the store of the default group. Waits for no other rank."""
    if ranks.size > 1:
        with suppress(RuntimeError):
            _store(ranks).set(str(ranks.rank), f"{os.getpid()} {_started(os.getpid())} {platform.node()}")


def _introduced(ranks: Ranks) -> list[tuple[str, int, str] | None]:
    """Return host, number and beginning of the processes in the store, None for a rank that is not there."""
    processes: list[tuple[str, int, str] | None] = [None] * ranks.size
    with suppress(RuntimeError):  # the rank that held the store is gone, and with it the names
        store = _store(ranks)
        for rank in range(ranks.size):
            if store.check([str(rank)]):
                pid, started, host = store.get(str(rank)).decode().split(" ", 2)
                processes[rank] = host, int(pid), started
    return processes


def _store(ranks: Ranks) -> Any:
    from .._compat import default_store

    distributed: Any = torch.distributed
    return distributed.PrefixStore(f"dsv4_ranks/{ranks.name}", default_store())


def _fields(pid: int) -> list[str]:
    """Return what the kernel says of a process after its name, [] if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else ""


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's words, "" if there is none or it has ended."""
    fields = _fields(pid)
    # A process that is being ended has its state of before while a driver frees what it held.
    return "" if not fields or fields[0] in "ZX" or int(fields[6]) & _EXITING else fields[19]
