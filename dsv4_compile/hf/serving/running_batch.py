"""RunningBatch: requests of different lengths that join and leave one batch of a converted model.

batch = RunningBatch(model, slots=8)
request = batch.submit(prompt_ids, max_new_tokens=64, stop_tokens=[eos])
for token in request:                     # runs the whole batch; or batch.run(), batch.step()
    ...

A request has one slot of a paged cache from its first chunk of prefill to its last token. Waiting requests join in the
order they came. A step prefills at most `prefill_chunk` tokens, then decodes one token of every other request; each
part is one captured graph on a GPU. The host waits for the device once a step, when it reads the tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...errors import DSV4Error, check, error, fail
from ...runtime import DraftStatistics, Statistics
from ...runtime.addresses import AtFixedAddresses
from ...sizes import check_size, shown
from ..model.arguments import callback, check_flags, integer, stop_set, token_ids
from ..model.causal_lm import CompilableForCausalLM
from ..model.draft_generate import refuse_missing_drafts
from .requests import Progress, Request
from .running_model import RunningModel
from .sampling import NO_TOKEN, RequestSampling

_log = logging.getLogger("dsv4_compile.hf")
_One = tuple[Progress, int]
"""A request and its new token."""


class RunningBatch(AtFixedAddresses):
    """Runs requests of a converted model together, each with the tokens that it gets alone.

    Args:
        model: what `hf.convert` returned, whole on this device. Its weights are shared; the cache is the batch's own.
        slots: most requests that run at the same time.
        max_seq_len: most tokens of a request, prompt and answer together, rounded up to whole pages of 256 (None = that
            of the model's cache).
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

    Raises E208 for a model that is not converted or is split over ranks, E204 for sizes.

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
        check(
            isinstance(model, CompilableForCausalLM) and model.model.dsv4_in_step is None,
            "E208",
            got=f"a {'split ' if isinstance(model, CompilableForCausalLM) else ''}{type(model).__name__}",
            why="the host of one device decides who joins",
            fix="pass a model that dsv4_compile.hf.convert returned, without mesh",
        )
        if drafts is not None:
            check_flags(drafts=drafts)
        if drafts and model.dsv4_drafts is None:
            refuse_missing_drafts()
        drafts = model.dsv4_drafts is not None if drafts is None else drafts
        slots, prefill_chunk = check_size("slots", slots), check_size("prefill_chunk", prefill_chunk, least=2)
        self.model, self.slots = model, slots
        with torch.inference_mode(False):  # later steps write its tensors in any mode
            self._steps = RunningModel(model, slots, max_seq_len, prefill_chunk, backend, options, graphs, drafts)
        self.max_seq_len, self.prefill_chunk = self._steps.max_seq_len, self._steps.prefill_chunk
        self.caches, self.graphs = self._steps.caches, self._steps.graphs
        self._waiting: deque[Progress] = deque()
        self._running: list[Progress | None] = [None] * slots
        self._submitted = 0
        self._uncalled: deque[_One] = deque()  # tokens whose callbacks have not been called
        self._dropped: dict[Progress, int] = {}
        self._lock = threading.RLock()  # held for a few lines, never while a model or a callback runs
        self._stepping: tuple[int, object] | None = None
        self._calling_back = self._unfinished = False
        self._to_cancel: list[Progress] = []
        self._steps.warm_up()

    def __repr__(self) -> str:
        return (
            f"RunningBatch({len(self.running)} of {self.slots} slots, {len(self._waiting)} waiting, "
            f"{self.max_seq_len} tokens each, graphs {self.graphs})"
        )

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [progress.request for progress in self._served()]

    def _served(self) -> list[Progress]:
        return [progress for progress in self._running if progress is not None]

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
        stop_tokens: Collection[int] = (),
        on_token: Callable[[int], object] | None = None,
        drafts: bool = True,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: token ids of one sequence, or an integer tensor `[S]`.
            max_new_tokens: most tokens to generate.
            temperature, top_k, top_p, seed: see `sampling.RequestSampling`; greedy unless `temperature` is above 0.
            stop_tokens: a token, or a collection or tensor of them, that end the request; it is its last.
            on_token: called with each token at the end of its step. If it raises, the request is cancelled, the others
                get their tokens and callbacks, and `step` raises the error, which is also the request's `error`.
            drafts: whether drafts of the request are verified, in a batch with drafts. Sampled tokens are distributed
                alike, but are others.

        Raises E201 for arguments of another type, ids outside the vocabulary or sampling out of range, and E204 for a
        request that would not fit its slot. A request that is not taken leaves the batch as it was.
        """
        self.check_process()
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
        sampling, stop = RequestSampling(temperature, top_k, top_p, seed), stop_set(stop_tokens, vocab)
        on_token = callback(on_token)
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
        with self._lock:
            if self._stepping is None or (self._calling_back and self._stepping[0] == threading.get_ident()):
                self._cancel(progress)
            else:
                self._to_cancel.append(progress)

    def run(self) -> None:
        """Run steps until no request waits or runs."""
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
    def _whole_step(self) -> tuple[list[_One], list[tuple[Progress, BaseException]]]:
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

    def _step(self) -> list[_One]:
        try:
            self._steps.check()
            self._join()
            self._steps.prepare_step()
            served = [progress for progress in self._served() if progress.state == "decode"]
            decoding = [progress for progress in served if not self._steps.is_plain(progress)]
            self._unfinished = True
            prefilled = self._steps.prefill(self._running)
            if decoding:
                self._run_decode(decoding)
            chosen = self._steps.chosen()  # the one wait of a step
            new = self._record({*prefilled, *decoding}, self._steps.new_tokens(self._running, chosen))
            self._unfinished = False
        except BaseException as fault:
            self._recover(fault)
            raise
        return new

    def _run_decode(self, decoding: list[Progress]) -> None:
        self._steps.decode(self._running, decoding)

    def _record(self, served: Collection[Progress], chosen: Sequence[Sequence[int]]) -> list[_One]:
        """Give requests their tokens, in the order of slots, and end those that are complete."""
        by_slot = tuple(zip(self._running, chosen, strict=True))
        tokens = [(progress, token) for progress, new in by_slot if progress in served for token in new]
        new: list[_One] = []
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
            with suppress(Exception):
                self._steps.chosen()  # until then the device may read the numbers that the host has sent
            for progress in running:
                raised = "was interrupted" if fault is None else f"raised {type(fault).__name__}"
                cause = error("E211", got=f"a step that {raised}", fix="submit the request again")
                cause.__cause__ = fault
                self._fail(progress, cause)
            self._unfinished = False

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

    def _without_dropped(self, new: list[_One]) -> list[_One]:
        """Return the new tokens of a step without those that `_cancel` has dropped."""
        dropped, self._dropped = self._dropped, {}
        remaining: list[_One] = []
        for progress, token in reversed(new):
            if dropped.get(progress, 0):
                dropped[progress] -= 1
            else:
                remaining.append((progress, token))
        return remaining[::-1]

    def _fail(self, progress: Progress, cause: DSV4Error) -> None:
        progress.error = cause
        self._end(progress, "failed")
        _log.error("%r: %s", progress.request, cause.got)

    def _end(self, progress: Progress, state: str) -> None:
        progress.state = state
        if progress in self._running:
            self._running[self._running.index(progress)] = None

    def _join(self) -> None:
        """Give free slots to waiting requests, in the order they came."""
        if not self._waiting or None not in self._running:
            return
        self._steps.prepare_join()
        while self._waiting and None in self._running:
            progress = self._waiting[0]
            self._running[self._running.index(None)] = progress
            progress.state = "prefill"
            self._waiting.popleft()
