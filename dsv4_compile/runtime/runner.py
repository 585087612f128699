"""DecodeRunner: a whole step, metadata included, as one CUDA graph for each padded batch size.

runner = DecodeRunner(step, buffers, inputs={"hidden": hidden}, caches=caches.layers)
runner.warm_up()                          # compile, measure, capture; changes no byte of the caches
buffers.load(query_start_loc, seq_lens)   # the next batch
hidden[:n].copy_(...)
out = runner.step(n)                      # one launch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import progress
from .._compat import pytree
from ..errors import check, fail, warn
from ..metadata import MetadataBuffers
from ..sizes import check_size, shown
from .addresses import AddressCheck, AtFixedAddresses, mark_static_inputs, named_tensors
from .backends import graphs_for
from .captures import Capture, Footprint, MemoryPlan
from .drafting import Drafting, DraftSource, DraftStatistics, staged
from .early_builds import also_for
from .sampling import Sampler, Sampling
from .start_times import spending
from .step import (
    Buckets,
    StepFunction,
    StepInputs,
    check_outputs,
    check_padding,
    count_tokens,
    no_requests,
    padded_buckets,
    step_call,
)
from .warmup import suspended, warming_up


@dataclass(slots=True)
class Statistics:
    """Number of captures and replays of a runner, and of steps that ran without a graph; bytes that captures hold."""

    captures: int = 0
    replays: int = 0
    uncaptured: int = 0
    capture_bytes: int = 0


class DecodeRunner(AtFixedAddresses):
    """Captures a step for padded sizes and replays the smallest that holds the batch.

    A batch of n tokens, decodes, speculated tokens and prefills alike, replays the smallest bucket of at least n. Rows
    n and later are padding, which reads and writes nothing. A larger batch runs uncaptured, with a warning (W601) the
    first time.

    Args:
        step: `step(*inputs, metadata, caches)` -> tensors with the tokens as first dim; compile it with
            `torch.compile(..., backend="dsv4")` and without CUDA graphs (E424). It must not wait for the device
            (E422), and must give the same tensors for the same batch. If it is a Module, compiled or not, the addresses
            of all parameters and buffers are compared too.
        buffers: the persistent metadata; the captured graph refreshes it from `buffers`' inputs.
        inputs: further persistent inputs `[max_num_batched_tokens, ...]` by name, in the order of `step`'s arguments.
            Their padding rows are zeroed, so they must not share them with a cache or other inputs (E201).
        caches: tensors that `step` writes in place: `PagedCaches.layers`, or any nest of lists, dicts and dataclasses.
        buckets: numbers of tokens to capture, prefill sizes included if they are worth a graph (None =
            `padded_buckets(max_num_seqs * tokens_each, tokens_each)`).
        tokens_each: tokens of a request in a decode: 1 + the number of speculated ones.
        sampler: how `run` chooses tokens between steps, see `sampling.Sampling`: "greedy" over logits `[T, vocab]`,
            captured, or a function of the outputs.
        max_run_steps: most steps of one `run`.
        drafts: what proposes tokens between steps, in place of a sampler: see `drafting.DraftSource`. `step` then
            returns logits `[T, vocab]`, or these and the taps of the source; `run` verifies, accepts and drafts in one
            capture, and `tokens_each` is 1 + `drafts.num_drafts`. Compile the source, or its modules run as they are.
        draft_caches: caches of the source, from its `new_caches`.
        graphs: "auto" for CUDA graphs, "standin" to replay on a CPU in tests. E420 on a CPU otherwise.
        debug: compare all addresses and the padding at each replay, not at the first alone. Waits for the device.
            `debug.witness` also finds inputs, lengths and block tables of an earlier step.

    The engine owns inputs, caches and buffers, and must not move them (E421). The captures own their outputs and
    workspaces. Outputs are views of that memory, valid until the next step.
    """

    def __init__(
        self,
        step: StepFunction,
        buffers: MetadataBuffers,
        *,
        inputs: Mapping[str, Tensor],
        caches: Any = (),
        buckets: Collection[int] | None = None,
        tokens_each: int | None = None,
        sampler: str | Sampler | None = None,
        max_run_steps: int = 256,
        drafts: DraftSource | None = None,
        draft_caches: Any = None,
        graphs: str = "auto",
        debug: bool = False,
    ) -> None:
        check(callable(step), "E201", got=f"step={shown(step)}", rule="a step is a function", fix="pass a function")
        check(isinstance(buffers, MetadataBuffers), "E201", got=f"buffers={shown(buffers)}", fix="pass MetadataBuffers")
        self._step, self.buffers, self.caches, self.debug = step, buffers, caches, debug
        self.inputs = StepInputs(inputs, buffers.max_num_batched_tokens)
        max_run_steps = check_size("max_run_steps", max_run_steps)
        self.drafting: Drafting | None = None
        if drafts is not None:
            check(sampler is None, "E201", got=f"drafts with {sampler=}", rule="drafts choose the tokens of a step")
            self.drafting = Drafting(buffers, drafts, draft_caches, max_run_steps)
        least = 1 if self.drafting is None else 1 + self.drafting.count
        tokens_each = check_size("tokens_each", least if tokens_each is None else tokens_each)
        check(
            self.drafting is None or tokens_each == least,
            "E201",
            got=f"{tokens_each=} with {least - 1} drafts of a request",
            rule="a step verifies all drafts and the token before them",
            fix="leave tokens_each out",
        )
        self.tokens_each = tokens_each
        self.statistics = Statistics()
        device, capacity = buffers.tensors["seq_lens"].device, buffers.max_num_batched_tokens
        self.graphs = graphs_for(device, graphs, 'DecodeRunner(graphs="standin")')
        largest = min(buffers.max_num_seqs * tokens_each, capacity)
        self.buckets = Buckets(padded_buckets(largest, tokens_each) if buckets is None else buckets, capacity)
        mark_static_inputs(named_tensors(caches, "caches"))
        self._addresses = AddressCheck(self._captured_tensors, device)
        self.inputs.check_memory(named_tensors(caches, "caches"), buffers)
        self.max_run_steps = max_run_steps
        self.sampling: Sampling | Drafting | None = self.drafting
        if sampler is not None:
            self.sampling = Sampling(buffers, sampler, tokens_each, max_run_steps)
        self._captures: dict[int, Capture] = {}
        self._runs: dict[int, Capture] = {}
        self._draft: Capture | None = None
        self._views: dict[int, Any] = {}  # views of the outputs by number of tokens: the outputs never move
        self._checked: set[str] = set()
        self._warned = False
        self._plan: MemoryPlan | None = None
        self._held = 0

    def _captured_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a capture holds the addresses of, by name."""
        module = getattr(self._step, "_orig_mod", self._step)
        named = self.inputs.named() | {f"metadata {name}": tensor for name, tensor in self.buffers.tensors.items()}
        named |= named_tensors(self.caches, "caches") | named_tensors(module, "step")
        return named if self.drafting is None else named | self.drafting.tensors()

    def __repr__(self) -> str:
        state = "captured" if self.sealed else "not warmed up"
        return f"DecodeRunner({', '.join(map(str, self.buckets.sizes))} tokens on {self.graphs.kind}, {state})"

    @property
    def sealed(self) -> bool:
        """True after warm_up; from then on nothing is compiled, captured or allocated."""
        return bool(self._captures or self._runs)

    def plan(self) -> MemoryPlan:
        """Run every bucket with padding alone and return the memory that the captures will need.

        The step compiles and tunes itself here. No live byte of a cache changes.
        """
        self.check_process()
        if self._plan is None:
            footprints: dict[int, Footprint] = {}
            runs: list[Footprint] = []
            with suspended(), no_requests(self.buffers), progress.stage("warm up", total=len(self.buckets)) as work:
                if self.drafting is not None:  # first: steps compile once more where no logits of drafts are kept yet
                    self.graphs.warm_up(self._draft_call())
                for size in self.buckets:
                    work.note(f"{size} tokens")
                    call_of = self._call_of if self.drafting is None else self._run_of
                    with also_for(size, self.buckets.sizes):
                        for _ in range(2):  # at the second size torch.compile may compile for all sizes
                            self.graphs.warm_up(call_of(size))
                    footprints[size] = self.graphs.measure(call_of(size))
                    if self.drafting is None and self._captures_run(size):
                        runs.append(self.graphs.measure(self._run_of(size)))
                    work.advance()
                if self.drafting is not None:
                    runs.append(self.graphs.measure(self._draft_call()))
            graphs = self.graphs.predict([*footprints.values(), *runs])
            self._plan = MemoryPlan(self._addresses.nbytes, footprints, graphs)
        return self._plan

    def warm_up(self) -> MemoryPlan:
        """Compile, tune and measure, then capture every bucket, largest first, and seal the runner.

        Returns the plan. Warns (W602) when the captures hold more than it predicted. E425 when called again. With
        `dsv4.strict="after_warmup"` nothing may compile after it, see `warming_up`.
        """
        check(not self.sealed, "E425", got="warm_up of a runner that has captured", fix="make another runner")
        plan = self.plan()
        # Recorded again: modules may have moved their weights into one matrix at the first call.
        self._addresses = AddressCheck(self._captured_tensors, self.graphs.device)
        captures: dict[int, Capture] = {}
        runs: dict[int, Capture] = {}
        with warming_up(), no_requests(self.buffers), progress.stage("capture", total=len(self.buckets)) as work:
            for size in self.buckets:
                work.note(f"{size} tokens")
                if self.drafting is None:
                    captures[size] = self._capture(size)
                if self._captures_run(size):
                    requests = size // self.tokens_each
                    runs[size] = self.graphs.capture(self._run_of(size), f"the run of {requests} requests")
                    self.statistics.captures += 1
                work.advance()
            if self.drafting is not None:
                self._draft = self.graphs.capture(self._draft_call(), "the drafts of new requests")
                self.statistics.captures += 1
        self._captures, self._runs = captures, runs
        self._held = self.statistics.capture_bytes = self.graphs.memory()
        plan.check(self._held)
        return plan

    def _capture(self, size: int) -> Capture:
        with spending("capture"):
            captured = self.graphs.capture(self._call_of(size), f"the step of {size} tokens")
        self.statistics.captures += 1
        check_outputs(captured.outputs, size)
        return captured

    def step(self, num_tokens: int | None = None, *, num_reqs: int | None = None, **inputs: Tensor) -> Any:
        """Run the batch that `buffers` and `inputs` hold; return the step's outputs, `[num_tokens, ...]` each.

        Args:
            num_tokens: tokens of the batch, as `query_start_loc` counts them.
            num_reqs: in place of `num_tokens`, the number of requests of `tokens_each` tokens.
            inputs: `[num_tokens, ...]` by name, copied into the persistent inputs first.

        One launch, and one more for each input with fewer rows than the bucket. E204 over capacity, E421 for a
        buffer that moved, E427 before warm_up, E429 (debug) for padding without its pad value.
        """
        self.check_process()
        if self.drafting is not None:
            fail("E201", got="step of a runner with drafts", rule="the next step needs its drafts", fix="call run")
        if not self._captures:
            fail("E427", got="step of a runner that has captured nothing")
        tokens = count_tokens(num_tokens, num_reqs, self.tokens_each, self.buffers.max_num_batched_tokens)
        for name, value in inputs.items():
            self.inputs.copy_in(name, value, tokens)
        bucket = self.buckets.fit(tokens)
        if bucket is None:
            return self._uncaptured(tokens)
        self.inputs.pad(tokens, bucket)
        self._replay(self._captures[bucket], bucket, tokens)
        if tokens not in self._views:
            self._views[tokens] = pytree.tree_map(lambda out: out[:tokens], self._captures[bucket].outputs)
        return self._views[tokens]

    def run(self, steps: int, num_reqs: int) -> tuple[Tensor, Tensor]:
        """Decode `steps` steps of the first `num_reqs` requests of the batch in `buffers`, `tokens_each` tokens each.

        With the greedy sampler or drafts each step is one launch, and the host waits for nothing. With any other
        sampler the host calls it and one op between steps. Lengths, positions and slots advance on the device. A
        request that runs out of reserved tokens becomes padding and leaves its length in `buffers.tensors["overflow"]`.
        After the run the buffers describe the next step.

        Returns:
            Tokens int64 `[steps, num_reqs, tokens_each]` and the number kept of each, int32 `[steps, num_reqs]`: views
            that the next run overwrites. Ignore the rows of requests that have stopped. With drafts a token of -1
            ends a request: its logits were NaN or infinite.
        """
        self.check_process()
        check(self.sealed, "E427", got="run of a runner that has captured nothing")
        sampling = self.sampling
        if sampling is None:
            fail("E201", got="run without a sampler", fix='DecodeRunner(..., sampler="greedy"), or a function')
        steps, num_reqs = check_size("steps", steps), check_size("num_reqs", num_reqs)
        check(steps <= self.max_run_steps, "E204", got=f"a run of {steps} steps, max_run_steps={self.max_run_steps}")
        most = self.buffers.max_num_seqs
        check(num_reqs <= most, "E204", got=f"a run of {num_reqs} requests", why=f"the buffers have rows for {most}")
        tokens = count_tokens(None, num_reqs, self.tokens_each, self.buffers.max_num_batched_tokens)
        bucket = self.buckets.fit(tokens)
        captured = self._runs.get(bucket or 0)
        sampling.begin()
        if self.drafting is not None:
            size = tokens if bucket is None else bucket
            call = self._run_of(size) if captured is None else None
            self.inputs.pad(tokens, size)
            for _ in range(steps):
                if captured is None:
                    self._uncaptured(tokens, call)
                else:
                    self._replay(captured, size, tokens)
            return sampling.result(steps, num_reqs)
        if captured is None or bucket is None:
            for _ in range(steps):
                sampling.finish_step(self.step(tokens), num_reqs)
            return sampling.result(steps, num_reqs)
        self.inputs.pad(tokens, bucket)
        for _ in range(steps):
            self._replay(captured, bucket, tokens)
        return sampling.result(steps, num_reqs)

    def draft(self) -> None:
        """Draft for the requests that `drafting.load` has described, before the first step of a run; one launch."""
        self.check_process()
        if self._draft is None:
            fail("E427", got="draft of a runner without drafts, or that has captured nothing")
        self._draft.replay()
        self.statistics.replays += 1

    def draft_statistics(self) -> DraftStatistics:
        """Return acceptance by position and tokens a step of all runs so far. Waits for the device."""
        if self.drafting is None:
            fail("E201", got="draft_statistics of a runner without drafts", fix="DecodeRunner(..., drafts=...)")
        return self.drafting.statistics()

    def _draft_call(self) -> Callable[[], None]:
        assert self.drafting is not None
        return torch.no_grad()(self.drafting.draft)

    def _captures_run(self, size: int) -> bool:
        requests = size // self.tokens_each
        return self.sampling is not None and self.sampling.captured and requests <= self.buffers.max_num_seqs

    def _run_of(self, size: int) -> Callable[[], None]:
        """Return a call that runs a step of `size` tokens, chooses tokens, and advances the batch."""
        step, sampling, requests = self._call_of(size), self.sampling, size // self.tokens_each
        assert sampling is not None
        sampling.begin()
        return torch.no_grad()(lambda: staged("advance", sampling.finish_step, staged("verify", step), requests))

    def _replay(self, captured: Capture, bucket: int, tokens: int) -> None:
        if self.debug or captured.what not in self._checked:
            self._addresses.check(captured.what)
            self._checked.add(captured.what)
        captured.replay()
        self.statistics.replays += 1
        if self.debug:
            self._check_replay(bucket, tokens)

    def _uncaptured(self, tokens: int, call: Callable[[], Any] | None = None) -> Any:
        reason = f"a batch of {tokens} tokens, above the largest bucket {self.buckets.sizes[-1]}"
        if not self._warned:
            self._warned = True
            warn("W601", got=reason)
        self.statistics.uncaptured += 1
        return (call or self._call_of(tokens))()

    def _call_of(self, size: int) -> Callable[[], Any]:
        """Return the whole step for `size` tokens at the persistent addresses, to capture or to run without a graph."""
        return step_call(self._step, self.buffers, self.inputs, self.caches, size)

    def captured_call(self, num_tokens: int | None = None) -> tuple[StepFunction, Callable[[], Any], str]:
        """Return the step, the call that the bucket of `num_tokens` captures and its name, for tools that capture it
        anew.

        The rows after the batch are zeroed. None is the smallest bucket; E204 above the largest.
        """
        tokens = self.buckets.sizes[0] if num_tokens is None else num_tokens
        bucket = self.buckets.fit(tokens)
        if bucket is None:
            fail("E204", got=f"{tokens} tokens", fix=f"pass at most {self.buckets.sizes[-1]}, the largest bucket")
        self.inputs.pad(tokens, bucket)
        call = self._call_of(bucket) if self.drafting is None else self._run_of(bucket)
        return self._step, call, f"the step of {bucket} tokens"

    def _check_replay(self, bucket: int, tokens: int) -> None:
        check_padding(self.buffers, tokens, bucket)
        held = self.graphs.memory()
        check(held <= self._held, "E425", got=f"captures of {held:,} bytes, {self._held:,} when they were sealed")
