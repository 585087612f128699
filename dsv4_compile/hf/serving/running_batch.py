"""RunningBatch: requests of different lengths that join and leave one batch of a converted model.

batch = RunningBatch(model, slots=8)
request = batch.submit(prompt_ids, max_new_tokens=64)
for token in request:                     # runs the whole batch; or batch.run(), batch.step()
    ...

A request has one slot of a paged cache from its first chunk of prefill to its last token. Waiting requests join in the
order they came. A step prefills at most `prefill_chunk` tokens, then decodes one token of every other request; each
part is one captured graph on a GPU. The host waits for the device once a step, when it reads the tokens.

with hf.RunningBatch(model, slots=8) as batch:  # of a model that is split over ranks, on all of them
    answer(batch) if rank == 0 else batch.serve()
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import check, fail
from ...runtime import DraftStatistics, Statistics
from ...sizes import check_size, shown
from ..model.arguments import callback, check_flags, integer, stop_set, token_ids
from ..model.draft_columns import refuse_missing_drafts
from .request_slots import NewToken, RequestSlots
from .requests import Progress, Request
from .running_model import running_class
from .running_ranks import RunningRanks, progress_of, ranks_of, rejecting
from .sampling import RequestSampling

_log = logging.getLogger("dsv4_compile.hf")


class RunningBatch(RequestSlots):
    """Runs requests of a converted model together, each with the tokens that it gets alone.

    Args:
        model: what `hf.load`, `hf.convert` or `models.v41.load` returned, whole or split. Its weights are shared; the
            cache is the batch's own.
        slots: most requests that run at the same time.
        max_seq_len: most tokens of a request, prompt and answer together, rounded up to whole pages of 256 (None = that
            of the model's cache; a V4.1 has none and rounds nothing).
        prefill_chunk: most prompt tokens of a step, of one or several requests. Longer prompts take several steps,
            between which the others decode. Smaller chunks shrink the cache and the waits of the others; a GPU
            computes chunks of some thousand tokens best.
        backend: "dsv4", or another backend of `torch.compile`, for the two kinds of steps; None runs them eager.
        options: of that backend. CUDA graphs are captured here, so they are none of its settings.
        graphs: "auto" captures CUDA graphs on a GPU and nothing on a CPU; "cuda", "off", or "standin" for tests.
        drafts: verify drafts of the model, so that a step gives a request up to 1 + N tokens (None = if it has any).
            Near the end of its slot a request decodes a token a step.

    Compiles and captures all of its steps when it is made, with progress, so that no request waits for that. Prompts
    are padded to `runtime.token_buckets(prefill_chunk)`, decodes to `runtime.request_buckets(slots)`.

    All ranks of a split model make the batch with the same arguments. Rank 0 submits and steps; every other rank calls
    `serve`, until rank 0 closes the batch and may call the model otherwise again. A step that fails on a rank, or a
    rank that is gone, ends the batch on all of them, with E703 and that rank's name.

    Raises E208 for a model that is not converted, E204 for sizes, E702 on all ranks for arguments that differ.

    No request ends, fails or changes another: one whose logits are NaN or infinite fails alone. One thread at a time
    runs steps, E208 otherwise; any thread may submit and cancel. Copies, pickles and use after a fork raise E432.
    Changed weights are read when requests join, outside of blocks of `hf.unchanged`; a parameter that a captured graph
    reads from another address raises E421.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_seq_len: int | None = None,
        prefill_chunk: int = 2048,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
        graphs: str = "auto",
        drafts: bool | None = None,
    ) -> None:
        kind = running_class(model)
        ranks = ranks_of(in_step := kind.in_step_of(model))
        with rejecting(ranks):
            super().__init__(check_size("slots", slots))
        arguments: dict[str, Any] = {"slots": slots, "max_seq_len": max_seq_len, "prefill_chunk": prefill_chunk}
        arguments |= {"backend": backend, "options": options, "graphs": graphs, "drafts": drafts}
        self._ranks: RunningRanks | None = None
        self._stepping: tuple[int, object] | None = None
        self._closed = self._to_close = False
        self._to_cancel: list[Progress] = []
        with rejecting(ranks):
            if drafts is not None:
                check_flags(drafts=drafts)
            if drafts and not kind.has_drafts(model):
                refuse_missing_drafts()
            drafts = kind.has_drafts(model) if drafts is None else drafts
            prefill_chunk = check_size("prefill_chunk", prefill_chunk, least=2)
            with torch.inference_mode(False):  # later steps write its tensors in any mode
                steps = kind(model, slots, max_seq_len, prefill_chunk, backend, options, graphs, drafts)
            if ranks is not None:
                self._ranks = RunningRanks(steps, in_step, arguments)
                weakref.finalize(self, self._ranks.leave)
        self.model, self._steps = model, steps
        self.max_seq_len, self.prefill_chunk = steps.max_seq_len, steps.prefill_chunk
        self.caches, self.graphs = steps.caches, steps.graphs
        with self._on_ranks():
            steps.warm_up()

    def __repr__(self) -> str:
        return (
            f"RunningBatch({len(self.running)} of {self.slots} slots, {len(self._waiting)} waiting, "
            f"{self.max_seq_len} tokens each, graphs {self.graphs})"
        )

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [progress.request for progress in self._served()]

    @property
    def statistics(self) -> Statistics:
        """Captures and replays of both kinds of steps; all zero without graphs."""
        return self._steps.statistics

    @property
    def draft_statistics(self) -> DraftStatistics:
        """Acceptance of the drafts of all requests so far; without steps in a batch without drafts."""
        drafts = self._steps.drafts
        return DraftStatistics(()) if drafts is None else drafts.draft_statistics

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and all callbacks have been called."""
        return not self._waiting and not self._served() and not self._uncalled

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Collection[int] | None = None,
        on_token: Callable[[int], object] | None = None,
        drafts: bool = True,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: token ids of one sequence, or an integer tensor `[S]`.
            max_new_tokens: most tokens to generate.
            temperature, top_k, top_p, seed: see `sampling.RequestSampling`; greedy unless `temperature` is above 0.
            stop_tokens: a token, or several, that end the request and are its last; None = the eos tokens of
                `model.generation_config`, [] = none.
            on_token: called with each token at the end of its step. If it raises, the request is cancelled, the others
                get their tokens and callbacks, and `step` raises the error, which is also the request's `error`.
            drafts: whether drafts of the request are verified, in a batch with drafts. Sampled tokens are distributed
                alike, but are others.

        Raises E201 for arguments of another type, ids outside the vocabulary or sampling out of range, and E204 for a
        request that would not fit its slot. A request that is not taken leaves the batch as it was.
        """
        self.check_process()
        self._check_takes()
        vocab, most = self._steps.vocab_size, self._steps.max_seq_len
        new = integer("max_new_tokens", max_new_tokens, 1)
        ids = token_ids(prompt, vocab, most)
        check(
            len(ids) + new <= most,
            "E204",
            got=f"a prompt of {'over ' * (len(ids) > most)}{min(len(ids), most)} tokens and {shown(new)} new ones",
            why=f"a slot holds {most} tokens",
            fix="shorten it, or make a RunningBatch with a larger max_seq_len",
        )
        check_flags(drafts=drafts)
        sampling, on_token = RequestSampling(temperature, top_k, top_p, seed), callback(on_token)
        stop = stop_set(stop_tokens, vocab, self.model.generation_config)
        with self._lock:
            progress = Progress(self._submitted, ids, new, stop, sampling, on_token)
            if self._steps.drafts is not None:
                progress.drafts, progress.accepted = drafts, [0] * self._steps.drafts.width
            request = Request(self, progress)
            self._submitted += 1
            self._waiting.append(progress)
        return request

    def cancel(self, request: Request) -> None:
        """End a request of this batch now, and free its slot. Does nothing if it has ended.

        While the model runs, as another thread or a hook may find it, the request ends after the step. Raises E201 for
        what is no request of this batch.
        """
        self.check_process()
        progress = request.progress_in(self) if isinstance(request, Request) else None
        if progress is None:
            other = isinstance(request, Request)
            fail(
                "E201",
                got="a request of another RunningBatch" if other else f"a {type(request).__name__}",
                rule="a batch cancels the requests that its submit returned",
                fix="call request.cancel()",
            )
        if self._ranks is not None and not self._ranks.leads:
            self._check_takes()
        with self._lock:
            if self._stepping is None or (self._calling_back and self._stepping[0] == threading.get_ident()):
                self._cancel(progress)
            else:
                self._to_cancel.append(progress)

    def run(self) -> None:
        """Run steps until no request waits or runs."""
        if self._ranks is not None:
            self._check_takes()
        while not self.idle:
            self.step()

    def step(self) -> list[tuple[Request, int]]:
        """Let waiting requests join, prefill a chunk, decode a token of the others; return the new tokens.

        Raises E208 if the model is in training mode or cannot be read, before anything runs. If the model's forward
        raises, or is interrupted, all running requests have failed and their slots are free; waiting ones still wait.
        """
        new, faults = self._whole_step()
        if faults:
            raise faults[0][1]
        return [(progress.request, token) for progress, token in new]

    def step_for(self, request: Request) -> None:
        """Run a step as `step` does, but log what callbacks of other requests than `request` raise."""
        _, faults = self._whole_step()
        for progress, fault in faults:
            if not isinstance(fault, Exception):
                raise fault
            if progress.request is not request:
                _log.error("a callback ended %r", progress.request, exc_info=fault)

    @torch.no_grad()
    def _whole_step(self) -> tuple[list[NewToken], list[tuple[Progress, BaseException]]]:
        """Run a step and call back; return the new tokens, and what callbacks raised, interrupts first."""
        self.check_process()
        turn = (threading.get_ident(), object())
        try:
            with self._lock:
                running, self._stepping = self._stepping, self._stepping or turn
            if running is not None:
                place = "inside a callback or a hook" if running[0] == turn[0] else "in a second thread in the middle"
                fail("E208", got=f"a step {place} of a step", fix="submit or cancel there instead")
            if self._unfinished:  # by an interrupt in the middle of a recovery
                self._recover(None)
            self._check_takes()
            new = self._step()
            faults = self._call_back()
            return self._without_dropped(new), faults
        finally:
            # First without the lock, for which an interrupt might end the wait.
            if self._stepping is turn:
                self._calling_back, self._stepping = False, None
            with self._lock:
                while self._to_cancel and self._stepping is None:
                    self._cancel(self._to_cancel.pop())
                if self._to_close and self._stepping is None:
                    self._end_batch()

    def _step(self) -> list[NewToken]:
        try:
            joining = self._joining()
            self._steps.prepare(bool(joining))
            if self._ranks is not None:
                if not joining and not self._served():
                    return []
                self._ranks.begin_step(joining, self._cancelled, bool(joining) or self._steps.reads_each_step)
            self._cancelled.clear()
            self._join(joining)
            return self._run_step()
        except BaseException as fault:
            self._recover(fault)
            raise

    def _run_step(self) -> list[NewToken]:
        """Run a step of the requests that have a slot; return their new tokens."""
        served = [progress for progress in self._served() if progress.state == "decode"]
        decoding = [progress for progress in served if not self._steps.is_plain(progress)]
        self._unfinished = True
        with self._on_ranks():
            prefilled = self._steps.prefill(self._running)
            if decoding:
                self._steps.decode(self._running, decoding)
            if self._ranks is not None:
                self._ranks.launched()
            chosen = self._steps.chosen()  # the one wait of a step
        tokens = self._steps.new_tokens(self._running, chosen)
        new = self._record({*prefilled, *decoding}, tokens)
        if self._ranks is not None:
            self._ranks.finish_step(tokens)
        self._unfinished = False
        return new

    def _on_ranks(self) -> AbstractContextManager[None]:
        """Return a context for work with collectives."""
        return nullcontext() if self._ranks is None else self._ranks.step()

    def _recover(self, fault: BaseException | None) -> None:
        ranks = self._ranks
        if ranks is not None and ranks.is_over(fault):
            self._fail_all(ranks.end(fault or KeyboardInterrupt()))
        super()._recover(fault)

    def serve(self) -> None:
        """Follow rank 0 until it closes the batch; on each other rank of a split model.

        Raises E703 if a rank is gone or a step fails on one of them, and E702 if this one chose other tokens than rank
        0: either ends the batch. Raises E208 on rank 0, and in a batch of a whole model.
        """
        self.check_process()
        ranks = self._ranks
        if ranks is None or ranks.leads:
            where = "in a batch of a whole model" if ranks is None else "on rank 0"
            fail("E208", got=f"serve() {where}", fix="submit requests, and call run() or step()")
        ranks.check_runs()
        with self._lock:
            running, self._stepping = self._stepping, self._stepping or (threading.get_ident(), object())
        check(running is None, "E208", got="a second serve() of this batch", fix="call it in one thread")
        try:
            while not self._closed and not self._to_close:
                self._follow(ranks)
        except BaseException as fault:
            self._fail_all(ranks.end(fault))
            raise
        finally:
            self._stepping = None
            if self._to_close:
                self.close()

    @torch.no_grad()
    def _follow(self, ranks: RunningRanks) -> None:
        """Do what the next plan of rank 0 says."""
        plan = ranks.next_plan()
        if plan is None:
            self._end_batch()
            return
        running = {progress.number: progress for progress in self._served()}
        for number in plan["cancelled"]:
            if number in running:
                self._end(running[number], "cancelled")
        joining = [*map(progress_of, plan["joins"])]
        if ranks.may_run(plan, lambda: self._steps.prepare(bool(joining))):
            for progress in joining:
                progress.request = Request(self, progress)
            self._waiting.extend(joining)
            self._join(joining)
            self._run_step()

    def __enter__(self) -> RunningBatch:
        """Return the batch, which the end of the block closes."""
        return self

    def __exit__(self, *fault: object) -> None:
        """Close the batch."""
        self.close()

    def close(self) -> None:
        """Cancel all requests, and end the batch on all ranks. Does nothing if it has ended.

        Other ranks return from `serve`; if one of them closes the batch, rank 0 raises E703 at its next step. In the
        middle of a step, as in a callback or a second thread, the batch ends after the step.
        """
        self.check_process()
        with self._lock:
            if self._stepping is None:
                self._end_batch()
            else:
                self._to_close = True

    def _end_batch(self) -> None:
        for progress in (*self._waiting, *self._served()):
            self._cancel(progress)
        self._uncalled.clear()
        self._closed, self._to_close = True, False
        if self._ranks is not None:
            self._ranks.close()

    def _check_takes(self) -> None:
        """Raise E208 on a rank that follows, and in a batch that was closed; raise the error that ended the batch."""
        if self._ranks is not None:
            self._ranks.check_takes()
        check(not self._closed, "E208", got="a RunningBatch that was closed", fix="make another RunningBatch")
