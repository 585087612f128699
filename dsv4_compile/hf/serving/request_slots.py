"""Requests of a `RunningBatch` that wait, have a slot, or end, without the model that runs them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from ...errors import DSV4Error, error
from ...runtime.addresses import AtFixedAddresses
from .requests import Progress
from .sampling import NO_TOKEN

_log = logging.getLogger("dsv4_compile.hf")
NewToken = tuple[Progress, int]
"""A request and its new token."""


class RequestSlots(AtFixedAddresses):
    """Waiting requests, the request in each slot, and what a step does to them."""

    _steps: Any

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._waiting: deque[Progress] = deque()
        self._running: list[Progress | None] = [None] * slots
        self._submitted = 0
        self._uncalled: deque[NewToken] = deque()  # tokens whose callbacks have not been called
        self._dropped: dict[Progress, int] = {}
        self._lock = threading.RLock()  # held for a few lines, never while a model or a callback runs
        self._calling_back = self._unfinished = False
        self._cancelled: list[int] = []  # numbers of requests that had a slot, since the last step

    def _served(self) -> list[Progress]:
        return [progress for progress in self._running if progress is not None]

    def _record(self, served: Collection[Progress], chosen: Sequence[Sequence[int]]) -> list[NewToken]:
        """Give requests their tokens, in the order of slots, and end those that are complete."""
        by_slot = tuple(zip(self._running, chosen, strict=True))
        tokens = [(progress, token) for progress, new in by_slot if progress in served for token in new]
        new: list[NewToken] = []
        for progress, token in tokens:
            if progress is None or progress.ended:  # by a token before, in the same step
                continue
            if token == NO_TOKEN:
                count = len(progress.tokens)
                fix = "look for NaN and infinity in the weights that its tokens reach, embeddings first"
                self._fail(progress, error("E211", got=f"logits of NaN or infinity after {count} new tokens", fix=fix))
                continue
            new.append((progress, token))
            progress.tokens.append(token)
            if progress.on_token is not None:
                self._uncalled.append((progress, token))
            if token in progress.stop_tokens:
                self._end(progress, "stop")
            elif len(progress.tokens) == progress.max_new_tokens:
                self._end(progress, "length")
        return new

    def _recover(self, fault: BaseException | None) -> None:
        """Bring requests into a clear state after a step that did not end; what has run a part of it has failed."""
        with self._lock:
            running = self._served()
            self._waiting = deque(progress for progress in self._waiting if progress not in running)
            for progress in (*self._waiting, *running):  # of a join in the middle of which the fault came
                if progress in running and progress.state == "waiting":
                    progress.state = "prefill"
                elif progress not in running and progress.state == "prefill":
                    progress.state = "waiting"
        if self._unfinished:
            self._wait_for_device()
            for progress in running:
                raised = "was interrupted" if fault is None else f"raised {type(fault).__name__}"
                cause = error("E211", got=f"a step that {raised}", fix="submit the request again")
                cause.__cause__ = fault
                self._fail(progress, cause)
            self._unfinished = False

    def _wait_for_device(self) -> None:
        """Wait for a step that did not end: until then the device may read numbers that the host has sent."""
        with suppress(Exception):
            self._steps.chosen()

    def _call_back(self) -> list[tuple[Progress, BaseException]]:
        """Pass new tokens to callbacks; cancel requests whose callbacks raise, and return what they raised."""
        faults: list[tuple[Progress, BaseException]] = []
        self._calling_back = True
        while self._uncalled:
            progress, token = self._uncalled.popleft()
            assert progress.on_token is not None
            try:
                progress.on_token(token)
            except BaseException as fault:
                self._cancel(progress)
                progress.error = fault if isinstance(fault, Exception) else None
                faults.append((progress, fault))
        return sorted(faults, key=lambda raised: isinstance(raised[1], Exception))

    def _cancel(self, progress: Progress) -> None:
        if progress.state == "waiting":
            self._waiting.remove(progress)
        later = [pair for pair in self._uncalled if pair[0] is progress]
        if self._calling_back and later:  # tokens of the same step: without drafts they would not be there yet
            self._uncalled = deque(pair for pair in self._uncalled if pair[0] is not progress)
            del progress.tokens[-len(later) :]
            self._dropped[progress] = len(later)
            if progress.ended:
                progress.state = "cancelled"
        if not progress.ended:
            self._end(progress, "cancelled")

    def _without_dropped(self, new: list[NewToken]) -> list[NewToken]:
        """Return the new tokens of a step without those that `_cancel` has dropped."""
        dropped, self._dropped = self._dropped, {}
        remaining: list[NewToken] = []
        for progress, token in reversed(new):
            if dropped.get(progress, 0):
                dropped[progress] -= 1
            else:
                remaining.append((progress, token))
        return remaining[::-1]

    def _fail_all(self, cause: DSV4Error) -> None:
        """Fail the requests that run and those that wait."""
        with self._lock:
            requests = dict.fromkeys((*self._waiting, *self._served()))
            self._waiting.clear()
            self._running[:] = [None] * self.slots
            for progress in requests:
                progress.error, progress.state = cause, "failed"
        self._unfinished = False
        if requests:
            _log.error("%d requests have failed: %s, %s", len(requests), cause.got, cause.why)

    def _fail(self, progress: Progress, cause: DSV4Error) -> None:
        progress.error = cause
        self._end(progress, "failed")
        _log.error("%r: %s", progress.request, cause.got)

    def _end(self, progress: Progress, state: str) -> None:
        progress.state = state
        if progress in self._running:
            if state == "cancelled":
                self._cancelled.append(progress.number)
            self._running[self._running.index(progress)] = None

    def _joining(self) -> list[Progress]:
        """Return the waiting requests for which slots are free, in the order they came."""
        return [*islice(self._waiting, self._running.count(None))]

    def _join(self, joining: Sequence[Progress]) -> None:
        """Give free slots to the first waiting requests."""
        for progress in joining:
            self._running[self._running.index(None)] = progress
            progress.state = "prefill"
            self._waiting.popleft()
