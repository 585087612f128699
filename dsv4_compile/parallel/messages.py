"""Messages between ranks through the store of the default group, outside of any collective: a wait has no timeout.

A rank that waits polls the store, and looks every half second for ranks that will not come: their processes have ended,
they have said that they left, or they wait in a different call of the group.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from ..errors import error
from . import agreement, watchdog
from .peers import Processes
from .ranks import Ranks

LOOK = 0.5
"""Seconds between two looks at the ranks that this one waits for."""
_WARN, _LATE = 10.0, 600.0
"""Seconds after which a late rank is named in the log, and after which it counts as absent."""
_LONGEST_PAUSE = 2e-3
"""Most seconds between two polls of the store."""
_log = logging.getLogger("dsv4_compile.parallel")


class Messages:
    """Values for JSON that ranks write under keys. All ranks of the group make this together.

    Args:
        ranks: the group.
        processes: its processes.
        what: the common work, for errors.
        timeout: seconds that a rank must be stopped before a wait for it ends.
    """

    def __init__(self, ranks: Ranks, processes: Processes, what: str, timeout: float) -> None:
        self.ranks, self.processes, self.what, self.timeout = ranks, processes, what, timeout
        self._store = watchdog.new_store("dsv4_messages", ranks)
        self._checked = 0.0

    def send(self, key: str, value: object) -> None:
        """Write `value` under `key`. Raises E703 if the store is gone with its process."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as fault:
            self.processes.fail(fault)

    def delete(self, key: str) -> None:
        """Delete a message that all have read."""
        with suppress(RuntimeError):
            self._store.delete_key(key)

    def post(self, key: str, value: object) -> None:
        """Write `value` under `key` if the store is still there."""
        with suppress(RuntimeError):
            self._store.set(key, json.dumps(value))

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no part any more, and why."""
        self.post(f"left/{self.ranks.rank}", why)
        with suppress(RuntimeError):
            self._store.add("left", 1)

    def receive(self, key: str, sender: int, fix: str = "") -> Any:
        """Wait for the value that rank `sender` writes under `key`.

        Args:
            fix: what makes a late rank come. It is logged while this one waits, for ten minutes at most; without it,
                the wait has no end.

        Raises E703 if the rank will not come, E702 if it waits in a different call of the group.
        """
        begin = looked = warned = time.monotonic()
        ahead = False
        while not self._has(key):
            now = time.monotonic()
            if now - looked > LOOK:
                looked, before = now, ahead
                self.look([sender], now - begin if fix else 0.0)
                ahead = self._is_ahead(sender)
                if ahead and before:
                    calls = ["another call" if rank == sender else self.what for rank in range(self.ranks.size)]
                    agreement.check_equal("calls", [{"call": call} for call in calls])
                if fix and now - warned > _WARN:
                    warned = now
                    _log.warning("waiting for %s: %s", self.processes.describe(sender), fix)
                if fix and now - begin > _LATE:
                    self.fail({sender: f"has not come for {_LATE:.0f} s"}, fix)
            # A poll costs a round trip; a longer wait affords longer pauses.
            time.sleep(min(_LONGEST_PAUSE, (now - begin) / 50))
        try:
            return json.loads(self._store.get(key))
        except RuntimeError as fault:
            self.processes.fail(fault)

    def await_all(self, keys: Mapping[int, str], seconds: float) -> None:
        """Wait until each rank in `keys` has written under its key or has ended, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        missing = dict(keys)
        with suppress(RuntimeError):
            while missing and time.monotonic() < deadline:
                missing = {rank: key for rank, key in missing.items() if not self._store.check([key])}
                for rank in self.processes.gone():
                    missing.pop(rank, None)
                time.sleep(_LONGEST_PAUSE if missing else 0.0)

    def look(self, ranks: Collection[int], seconds: float = 0.0) -> None:
        """Raise E703 if one of `ranks` will not come; this rank has waited for `seconds`."""
        lookout = self.processes.lookout
        absent = ({} if lookout is None else dict(lookout.reasons())) | dict.fromkeys(self.processes.gone(), "ended")
        if seconds > self.timeout:
            absent |= dict.fromkeys(self.processes.stopped(), "is stopped, by a signal or a debugger")
        absent = {rank: why for rank, why in absent.items() if rank in ranks}
        if absent:
            self.fail(absent | self._left())
        self.check_left()

    def look_again(self, ranks: Collection[int]) -> None:
        """Look at `ranks` if the last look is some time ago: a look costs a round trip."""
        if time.monotonic() - self._checked > LOOK / 10:
            self.look(ranks)

    def check_left(self, cause: BaseException | None = None) -> None:
        """Raise E703 if a rank has called `leave`. Costs one round trip."""
        self._checked = time.monotonic()
        if left := self._left():
            self.fail(left, cause=cause)

    def fail(self, absent: Mapping[int, str], fix: str = "", cause: BaseException | None = None) -> NoReturn:
        """Raise E703 for ranks that do not come, with the reason of each."""
        names = "; ".join(f"{self.processes.describe(rank)} {why}" for rank, why in absent.items())
        got = f"on rank {self.ranks.rank} of {self.ranks.size}: {self.what}"
        raise error("E703", got=got, why=names, fix=fix) from cause

    def _left(self) -> dict[int, str]:
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank] if self._has("left") else []
        return {rank: json.loads(self._store.get(f"left/{rank}")) for rank in others if self._has(f"left/{rank}")}

    def _is_ahead(self, rank: int) -> bool:
        lookout = self.processes.lookout
        return lookout is not None and rank in lookout.ahead()

    def _has(self, key: str) -> bool:
        distributed: Any = torch.distributed
        try:
            return bool(self._store.check([key]))
        except RuntimeError as fault:
            if type(fault) is distributed.DistStoreError:  # no answer in time: its process may be stopped
                return False
            self.processes.fail(fault)
