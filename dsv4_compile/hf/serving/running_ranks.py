"""The ranks of a `RunningBatch` of a split model: rank 0 plans each step, the other ranks follow.

Before a step, rank 0 sends its plan: requests that join, with prompts and options, and requests that were cancelled.
The others wait for it outside of any collective, so an idle batch runs into no timeout. Before a step that reads
weights anew, all ranks say whether they can run it, and none launches unless all can. Tokens do not travel: each rank
chooses them from logits that are gathered, by random numbers of the request's seed. A plan has a checksum of all tokens
before, so ranks that differ end the batch.
"""

from __future__ import annotations

import itertools
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import DSV4Error, check, error, fail
from ...parallel import Ranks, agreement, watchdog
from ...parallel.fake_group import is_fake
from ...parallel.messages import Messages
from ...runtime import groups
from ..model.call_facts import fact, settings
from ..model.in_step import InStep, is_agreed
from .requests import Progress
from .sampling import RequestSampling

_CALL = "RunningBatch"
_SHORT = 0.2
"""Seconds for an answer of ranks that may not follow."""
_FOLLOW = "call batch.serve() on all ranks but rank 0"
_log = logging.getLogger("dsv4_compile.hf")
_numbers = itertools.count()


def ranks_of(in_step: Any) -> Ranks | None:
    """Return the ranks of a model's `InStep`, None for a whole model and if no other rank exists."""
    if in_step is None or in_step.ranks.size == 1 or is_fake(in_step.ranks):
        return None
    ranks: Ranks = in_step.ranks
    return ranks


@contextmanager
def rejecting(ranks: Ranks | None) -> Iterator[None]:
    """Tell `ranks` what the block raises on this one: E702 on all of them unless all raise the same."""
    try:
        yield
    except Exception as fault:
        if ranks is not None and not is_agreed(fault):
            agreement.reject(_CALL, fault, ranks)
        raise


def record_of(progress: Progress) -> dict[str, Any]:
    """Return what other ranks need to know of a request that joins."""
    sampling = progress.sampling
    return {
        "number": progress.number,
        "prompt": progress.prompt,
        "max_new_tokens": progress.max_new_tokens,
        "stop_tokens": sorted(progress.stop_tokens),
        # Decimal texts of integers are bounded.
        "sampling": [sampling.temperature, hex(sampling.top_k), sampling.top_p, hex(sampling.seed)],
        "drafts": progress.drafts,
        "accepted": progress.accepted,
    }


def progress_of(record: Mapping[str, Any]) -> Progress:
    """Return the request of a `record_of`."""
    temperature, top_k, top_p, seed = record["sampling"]
    sampling = RequestSampling(temperature, int(top_k, 16), top_p, int(seed, 16))
    values = {**record, "stop_tokens": frozenset(record["stop_tokens"])}
    return Progress(**values | {"sampling": sampling, "on_token": None})


class RunningRanks:
    """A rank of a `RunningBatch`, which all ranks make together.

    Args:
        steps: of the split model, a `RunningModel` or `RunningV41`.
        in_step: that of the model.
        arguments: of the batch, which must be equal on all ranks.

    Attributes:
        leads: whether this is rank 0, which takes requests.
        pending: whether other ranks run a step that this one has not finished.
        ended: what ended the batch, None while it runs and after `close`.

    Raises E702 on all ranks if arguments, settings or the weights that all have differ.
    """

    def __init__(self, steps: Any, in_step: InStep, arguments: Mapping[str, Any]) -> None:
        self._steps, self.in_step = steps, in_step
        self.ranks: Ranks = self.in_step.ranks
        self.leads, self.pending, self.closed = self.ranks.rank == 0, False, False
        self.ended: DSV4Error | None = None
        self._bits: tuple[Any, int] | None = None
        facts = {name: fact(value) for name, value in arguments.items()} | self._facts()
        del facts["gradients"]  # steps compute none
        with self.in_step.watched():
            agreement.check_agree(_CALL, facts, self.ranks)
        processes = self.in_step.processes
        self._messages = Messages(self.ranks, processes, "a RunningBatch", self.in_step.timeout)
        self._watchdog: watchdog.Watchdog | None = None
        if steps.device.type == "cuda" and not self.ranks.symmetric:  # NCCL would wait for its own, longer timeout
            work = watchdog.DeviceWork(steps.device)
            self._watchdog = watchdog.watch(self.ranks, processes, work, self.in_step.timeout)
        self._number = self._checksum = self._asked = 0
        self._process = os.getpid()
        # Leaves the batch where the group is destroyed or the interpreter ends.
        groups.free_before_destruction()
        self._key = f"running {next(_numbers)}", self.ranks.name
        watchdog.registered[self._key] = self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of the model in the block; E703 for a collective that fails, and for others if it raises."""
        with ExitStack() as stack:
            if self._watchdog is not None:
                stack.enter_context(self._watchdog.call())
            try:
                with self.in_step.step():
                    yield
            except DSV4Error as fault:
                if fault.code == "E703":
                    self._messages.check_left(fault)  # a rank that left says more than the end of its connection
                raise

    def begin_step(self, joining: Sequence[Progress], cancelled: Sequence[int], asks: bool) -> None:
        """Tell the other ranks what a step does; with `asks`, raise E702 before it runs unless all can run it."""
        processes = self.in_step.processes
        if processes.followed not in (None, self):
            fail("E208", got="a step while the other ranks follow another RunningBatch", fix="close that one first")
        self._messages.look_again(self._others())
        joins = [record_of(progress) for progress in joining]
        plan = {"joins": joins, "cancelled": [*cancelled], "asks": asks, "checksum": self._checksum}
        self._number += 1
        processes.followed, self.pending = self, True
        self._messages.send(f"plan/{self._number}", plan)
        if asks and (refusal := self._refusal()) is not None:
            self.pending = False
            raise refusal

    def _refusal(self) -> DSV4Error | None:
        """Return E702 if a rank cannot run the step, or would run a different one; tell the others."""
        answers: list[dict[str, Any]] = [{"rejected": "", **self._facts()}]
        for rank in self._others():
            key = f"answer/{self._number}/{rank}"
            answers.append(self._messages.receive(key, rank, _FOLLOW))
            self._messages.delete(key)
        refusal: DSV4Error | None = None
        if any(answer["rejected"] for answer in answers):
            answers = [{"rejected": answer["rejected"]} for answer in answers]
        try:
            agreement.check_equal("a step of a RunningBatch", answers)
        except DSV4Error as fault:
            refusal = fault
        self._asked = self._number
        self._messages.send(f"go/{self._number}", "" if refusal is None else refusal.got)
        return refusal

    def launched(self) -> None:
        """Tidy up on rank 0 while its step runs; raise E703 if a rank has left meanwhile."""
        if self.leads:
            before = self._number - 1  # all have read its plan: they ran it, or said that they cannot
            self._messages.delete(f"plan/{before}")
            self._messages.delete(f"go/{before}")
            self._messages.look(self._others())

    def finish_step(self, tokens: Sequence[Sequence[int]]) -> None:
        """End a step that gave each slot `tokens`."""
        self._checksum = zlib.crc32(repr(tokens).encode(), self._checksum)
        self.pending = False

    def next_plan(self) -> dict[str, Any] | None:
        """Wait for the next plan of rank 0; None if it has closed the batch. Raises E703 if it has failed."""
        plan: dict[str, Any] = self._messages.receive(f"plan/{self._number + 1}", 0)
        self._number += 1
        if "end" in plan:
            self.closed = True
            self._messages.post(f"end/{self.ranks.rank}", "read")
            if plan["end"]:
                self._messages.fail({0: plan["end"]})
            return None
        self.pending = True
        sums = plan["checksum"], self._checksum
        if sums[0] != sums[1]:
            texts = [{"checksum of tokens": f"{value:08x}"} for value in (sums[0], *[sums[1]] * self.ranks.rank)]
            agreement.check_equal("steps of a RunningBatch", texts)
        return plan

    def may_run(self, plan: Mapping[str, Any], prepare: Callable[[], None]) -> bool:
        """Run `prepare`, and return whether all ranks can run the step of `plan`."""
        if not plan["asks"]:
            prepare()
            return True
        answer: dict[str, Any] = {"rejected": ""}
        try:
            prepare()
            answer |= self._facts()
        except Exception as fault:
            answer["rejected"] = agreement.summary(fault)
        self._messages.send(f"answer/{self._number}/{self.ranks.rank}", answer)
        refusal = self._messages.receive(f"go/{self._number}", 0)
        if refusal:
            _log.error("rank %d: no rank runs the step that rank 0 planned: %s", self.ranks.rank, refusal)
            self.pending = False
        return not refusal

    def check_takes(self) -> None:
        """Raise E208 unless this is rank 0; raise the error that has ended the batch."""
        check(
            self.leads,
            "E208",
            got=f"a request or a step on rank {self.ranks.rank} of {self.ranks.size}",
            why="rank 0 decides who joins",
            fix="call batch.serve() on this rank, and submit on rank 0",
        )
        self.check_runs()

    def check_runs(self) -> None:
        """Raise the error that has ended the batch."""
        if self.ended is not None:
            raise error(self.ended.code, got=self.ended.got, why=self.ended.why, fix=self.ended.fix)

    def is_over(self, fault: BaseException | None) -> bool:
        """Return whether the batch cannot go on after `fault`: others are in the step, or a rank is gone."""
        gone = isinstance(fault, DSV4Error) and fault.code == "E703"
        return self.pending or self.ended is not None or gone

    def end(self, fault: BaseException) -> DSV4Error:
        """End the batch on all ranks because of `fault` on this one; return the error that says so."""
        if self.ended is None:
            raised, code = f"raised {agreement.summary(fault)}", getattr(fault, "code", "")
            lookout = self.in_step.processes.lookout
            if lookout is not None and (self.pending or code == "E702"):  # others may wait in a collective
                lookout.leave_call(fault)
            if isinstance(fault, DSV4Error) and is_agreed(fault):
                self.ended = fault
            else:
                why = f"{self.in_step.processes.describe(self.ranks.rank)} {raised}"
                got = f"on rank {self.ranks.rank} of {self.ranks.size}: a RunningBatch"
                self.ended = error("E703", got=got, why=why, fix="see that error, and start all ranks again")
            self._leave(raised)
        return self.ended

    def close(self, why: str = "") -> None:
        """Leave the batch, and end it on all ranks: with E703 there if this is not rank 0, or for a reason `why`."""
        if not self.closed and self.ended is None:
            self._leave(why)
        self.closed = True
        watchdog.registered.pop(self._key, None)

    def leave(self) -> None:
        """Close a batch that nobody has closed. Does nothing in a process that was forked after it."""
        if os.getpid() == self._process and not self.closed and self.ended is None:
            _log.warning("rank %d leaves a RunningBatch that was not closed", self.ranks.rank)
            self.close()

    def group_exists(self) -> bool:
        """Return whether this is still registered for its group."""
        return not self.closed

    def _leave(self, why: str) -> None:
        processes = self.in_step.processes
        if processes.followed is self:
            processes.followed = None
        if self.leads:
            if self.pending:
                self._messages.post(f"go/{self._number}", why or "closed")
            self._messages.post(f"plan/{self._number + 1}", {"end": why})
            # The store may end with this process, which may end next.
            patience = watchdog.PATIENCE if self._number and not self.pending else _SHORT
            self._messages.await_all({rank: f"end/{rank}" for rank in self._others()}, patience)
        else:
            self._messages.leave(why or "has left its RunningBatch")
        self.pending = False

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal on all ranks where weights are read."""
        facts = {name: repr(value) for name, value in settings(self._steps.stack).items()}
        state = self._steps.state_of_weights()
        if self._bits is None or state != self._bits[0]:
            self._bits = state, agreement.digest(*self._steps.shared_weights())
        return {**facts, "bits of weights that all ranks have": self._bits[1]}

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
