"""Checks that ranks do the same: options, calls and results; and which rank has ended when a collective fails."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import check, fail
from .collectives import gather_objects
from .ranks import Ranks

_EXITING = 0x4
"""Flag of the kernel for a process that is being ended."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agree(what: str, facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise E702 on all ranks, naming facts and ranks, unless every rank passes equal `facts`."""
    check_equal(what, gather_objects(dict(facts), ranks))


def check_equal(what: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Raise E702, naming facts and ranks, unless the facts `found` on each rank are equal."""
    differing = []
    for name in sorted({name for each in found for name in each}):
        values = [each.get(name) for each in found]
        if any(value != values[0] for value in values):
            differing.append(f"{name} = {', '.join(f'{value!r} on rank {i}' for i, value in enumerate(values))}")
    check(not differing, "E702", got=f"{what}: {'; '.join(differing)}")


def digest(*tensors: Tensor) -> int:
    """Return a sum of the tensors' bits that does not depend on the order of its terms. Synchronises."""
    total: Tensor | None = None
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            word = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
            one = word.sum(dtype=torch.int64) * 31 + tensor.numel()
            total = one if total is None else total * 17 + one
    return 0 if total is None else int(total)


class Processes:
    """The processes of all ranks, by which one that has ended is recognised on its host.

    Args:
        patience: seconds that a process whose connections are closed may need to disappear.

    Attributes:
        places: by rank, name of its host and number of its process there.
        visible: by rank, number and beginning of the processes that are seen from here.
    """

    def __init__(self, ranks: Ranks, patience: float = 5.0) -> None:
        self.ranks, self.patience = ranks, patience
        mine = platform.node(), os.getpid(), _started(os.getpid())
        found = gather_objects(mine, ranks)
        self.places = [(host, pid) for host, pid, _ in found]
        # A process in another container has another number there, or none.
        self.visible = {
            rank: (pid, started)
            for rank, (host, pid, started) in enumerate(found)
            if host == mine[0] and started and _started(pid) == started
        }

    def gone(self) -> list[int]:
        """Return the visible ranks whose processes have ended."""
        return [rank for rank, (pid, started) in self.visible.items() if _started(pid) != started]

    def describe(self, rank: int) -> str:
        """Return rank, process and host in words."""
        host, pid = self.places[rank]
        return f"rank {rank} (process {pid} on {host})"

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended, waiting a few seconds for the first one."""
        deadline = time.monotonic() + self.patience
        while True:
            gone = self.gone()
            if gone or time.monotonic() > deadline:
                return gone
            time.sleep(0.05)

    def fail(self, fault: BaseException) -> NoReturn:
        """Raise E703 for a `fault` of a collective, with the ranks that have ended."""
        first = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        names = ", ".join(f"rank {rank} (process {self.visible[rank][0]})" for rank in self.ended())
        if names:
            why, fix = f"{names} ended", ""
        else:
            why = f"{len(self.visible)} of {self.ranks.size} ranks are seen from here, and none has ended"
            fix = "make the same calls with the same inputs on every rank; see the errors of the other ranks"
        fail("E703", got=f"on rank {self.ranks.rank} of {self.ranks.size}: {first}", why=why, fix=fix)


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's words, "" if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    # A process that is being ended has its state of before while a driver frees what it held.
    return "" if fields[0] in "ZX" or int(fields[6]) & _EXITING else fields[19]
