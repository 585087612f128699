"""`witness`: which step last wrote each persistent buffer, and an error before a replay that reads an older one.

    with dsv4_compile.debug.witness(runner):
        serve()

A captured graph knows addresses: a buffer that nobody filled for this step gives the values of an earlier one. Outside
the block nothing is watched, and a replay costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ..errors import check
from ..metadata import MetadataBuffers
from ..runtime import DecodeRunner
from ..runtime.addresses import named_tensors
from ..runtime.aliasing import overlap
from ..runtime.compiled import CapturedGraph
from ..runtime.cuda_graphs import CudaGraphs
from ..runtime.standin import StandInGraphs
from .contexts import Contexts
from .staleness import Batch, Reading, Stale
from .writes import Buffer, Write, Writes

_KINDS = {"seq_lens": "batch", "slot_mapping": "batch", "query_start_loc": "starts"}
_ADVANCED = ("query_start_loc", "seq_lens", "input_ids", "overflow")
"""Buffers that a captured run of several steps writes for its next step."""
_REFRESHES = ("batch", "starts", "table")
"""Kinds of buffers that `refresh` reads."""
Owner = DecodeRunner | MetadataBuffers | Mapping[str, Tensor]


class Witness:
    """Writes to the buffers of some owners, and the stale reads.

    Attributes:
        stale: findings, in their order.
    """

    def __init__(
        self, owners: Sequence[Owner], strict: bool, report: Callable[[Stale], Any] | None, contexts: bool
    ) -> None:
        self.stale: list[Stale] = []
        self._strict, self._report = strict, report
        self._runners = [owner for owner in owners if isinstance(owner, DecodeRunner)]
        metadata = [runner.buffers for runner in self._runners]
        metadata += [owner for owner in owners if isinstance(owner, MetadataBuffers)]
        self._contexts = {id(runner): Contexts(runner.buffers) for runner in self._runners if contexts}
        self._metadata = list({id(buffers_of_owner): buffers_of_owner for buffers_of_owner in metadata}.values())
        watched = [buffer for buffers_of_owner in self._metadata for buffer in _buffers_of(buffers_of_owner)]
        self._of_runner = {id(runner): _inputs_of(runner, watched) for runner in self._runners}
        watched += [buffer for inputs in self._of_runner.values() for buffer in inputs]
        for owner in owners:
            if isinstance(owner, Mapping):
                watched += [Buffer(f"input {name}", tensor, "input") for name, tensor in owner.items()]
        for runner in self._runners:
            caches = named_tensors(runner.caches, "caches")
            watched += [Buffer(name, tensor, "cache") for name, tensor in caches.items()]
        self.buffers = watched
        self.mode = Writes(watched)
        self._since: dict[Any, int] = {}
        self._counts: dict[Any, int] = {}
        self._running = False

    def __str__(self) -> str:
        self.mode.look()
        width = max((len(buffer.name) for buffer in self.buffers), default=0)
        lines = [f"{'buffer':{width}}  last written"]
        for buffer in self.buffers:
            parts = {str(write) for _, write in buffer.rows}
            more = f", other rows earlier ({len(parts)} writes)" if len(parts) > 1 else ""
            lines.append(f"{buffer.name:{width}}  {buffer.last}{more}")
        return "\n".join([*lines, *(f"stale: {finding}" for finding in self.stale)])

    def last_write(self, name: str) -> Write:
        """Return the last write of a buffer by its name in messages. E201 for an unknown name."""
        self.mode.look()
        by_name = {buffer.name: buffer for buffer in self.buffers}
        check(name in by_name, "E201", got=f"buffer {name!r}", rule=f"buffers are {', '.join(by_name)}")
        return by_name[name].last

    def wrote(self, tensor: Tensor, by: str) -> None:
        """Record a write that torch cannot see, of a kernel or a foreign library; `by` names it in messages."""
        write = self.mode.new(by)
        for buffer in self.mode.sharing(tensor):
            buffer.add(write, *buffer.rows_of(tensor))

    def reads(self, key: Any, where: str, rows: Mapping[Buffer, tuple[int, int]]) -> Reading:
        """Return the reading of a step that is about to run; `key` is equal for steps that read the same buffers."""
        self.mode.look()
        return Reading(self.mode.step, where, self._since.get(key, -1), rows)

    def done(self, key: Any, written: Sequence[Buffer], where: str) -> None:
        """Count the step that has run, and record the writes of its graph."""
        by = self.mode.new(where)
        for buffer in written:
            if buffer.kind in ("cache", "output"):
                buffer.add(by)
        self._since[key] = by.serial
        self._counts[key] = self._counts.get(key, 0) + 1
        self.mode.step = 1 + max(self._counts.values())
        following = self.mode.new(where)
        for buffer in written:
            if buffer.kind not in ("cache", "output"):
                buffer.add(following)

    def found(self, stale: Iterator[Stale]) -> None:
        """Keep findings, report them, and raise the first if the witness is strict."""
        for finding in stale:
            self.stale.append(finding)
            if self._report is not None:
                self._report(finding)
            if self._strict:
                raise finding.error()

    def step_of(self, runner: DecodeRunner, where: str, bucket: int, tokens: int) -> Callable[[], None] | None:
        """Check a step that a runner is about to make; return what to call after it, None for a foreign runner."""
        runner_inputs = self._of_runner.get(id(runner))
        if runner_inputs is None:
            return None
        metadata = _tensors_of(runner.buffers, self.buffers)
        rows = {buffer: (0, buffer.count) for buffer in metadata if buffer.kind not in ("output", "other")}
        inputs = dict.fromkeys(runner_inputs, (0, tokens))
        # What a run does not advance holds for all its steps.
        read_each_step = {} if self._running else inputs
        reading, batch = self.reads(id(runner), where, rows | read_each_step), Batch.of(runner.buffers)
        self.found(reading.tokens(batch, tokens))
        self.found(reading.each_step())
        self.found(reading.copied(batch, runner.buffers))
        self.found(reading.pages(batch, runner.buffers))
        self.found(self.reads(id(runner), where, inputs).padding(tokens, bucket))
        owned = {id(tensor) for tensor in named_tensors(runner.caches, "caches").values()}
        caches = [buffer for buffer in self.buffers if buffer.kind == "cache" and id(buffer.tensor) in owned]
        contexts = self._contexts.get(id(runner))
        if contexts is not None:
            self.found(contexts.missing(reading, caches, batch))
        written = [*caches]
        written += [buffer for buffer in metadata if buffer.kind == "output"]
        if where.startswith("the run"):
            advanced = [runner.buffers.tensors[name] for name in _ADVANCED]
            written += [b for b in (*metadata, *runner_inputs) if any(overlap(b.tensor, tensor) for tensor in advanced)]

        def done() -> None:
            self.done(id(runner), written, where)
            if contexts is not None:
                contexts.wrote(batch)

        return done

    def graph_of(self, graph: CapturedGraph, where: str, args: Sequence[Any]) -> Callable[[], None] | None:
        """Check a compiled graph that is about to be replayed; return what to call after it."""
        rows: dict[Buffer, tuple[int, int]] = {}
        for tensor in (arg for arg in args if isinstance(arg, Tensor)):
            for buffer in self.mode.sharing(tensor):
                first, end = buffer.rows_of(tensor)
                low, high = rows.get(buffer, (first, end))
                rows[buffer] = min(low, first), max(high, end)
        if not rows:
            return None
        key = (id(graph), *(arg.data_ptr() for arg in args if isinstance(arg, Tensor) and self.mode.sharing(arg)))
        read = [owner for owner in self._metadata if any(b in rows for b in _tensors_of(owner, self.buffers))]
        inputs = {b: (0, b.count) for owner in read for b in _tensors_of(owner, self.buffers) if b.kind in _REFRESHES}
        with_inputs = self.reads(key, where, inputs | rows)
        self.found(with_inputs.refreshed())
        self.found(self.reads(key, where, rows).each_step())
        for owner in read:
            batch = Batch.of(owner)
            self.found(with_inputs.copied(batch, owner))
            self.found(with_inputs.pages(batch, owner))
        before = {buffer: buffer.version for buffer in rows}

        def done() -> None:
            self.done(key, [b for b in rows if b.kind == "cache" or b.version != before[b]], where)

        return done

    @contextmanager
    def running(self, runner: DecodeRunner) -> Iterator[None]:
        """Mark a run of several steps."""
        outer, self._running = self._running, id(runner) in self._of_runner
        try:
            yield
        finally:
            self._running = outer


@contextmanager
def witness(
    *owners: Owner, strict: bool = True, report: Callable[[Stale], Any] | None = None, contexts: bool = False
) -> Iterator[Witness]:
    """Watch persistent buffers inside the block; a step that would read a stale one raises E431 before it runs.

        with dsv4_compile.debug.witness(runner) as seen:
            serve()
        print(seen)  # each buffer with the step that wrote it last, and the line

    Steps of a `DecodeRunner` are checked, and replays of graphs of `dsv4.cudagraph="full"` that read a buffer. Each
    check reads lengths and block tables, so it waits for the device.

    Args:
        owners: runners, with their metadata, inputs and caches; `MetadataBuffers`; or tensors by name that are written
            for each step.
        strict: raise; otherwise findings are listed in `stale` alone, and the step runs.
        report: called with each finding.
        contexts: also check, in runners, that no token before a query is missing after one that a step wrote. Not for
            made-up contexts, as in benchmarks. Tell of transfers into caches by `Witness.wrote`.
    """
    for owner in owners:
        known = isinstance(owner, (DecodeRunner, MetadataBuffers, Mapping))
        rule = "witness takes runners, MetadataBuffers, and mappings of tensors"
        check(known, "E201", got=type(owner).__name__, rule=rule, fix="pass one of them")
    seen = Witness(owners, strict, report, contexts)
    with ExitStack() as stack:
        stack.enter_context(_steps(seen))
        stack.enter_context(_graphs(seen))
        stack.enter_context(_warm_up(seen))
        stack.enter_context(seen.mode)
        yield seen


def _buffers_of(metadata: MetadataBuffers) -> list[Buffer]:
    """Return all buffers of `metadata`, with the kind that their declaration gives them."""
    kinds = {spec.name: "output" for spec in metadata.plan.specs if spec.filled_by == "refresh"}
    kinds |= {f"{group}_block_table": "table" for group in metadata.groups} | _KINDS
    return [Buffer(f"metadata {name}", t, kinds.get(name, "other")) for name, t in metadata.tensors.items()]


def _tensors_of(metadata: MetadataBuffers, buffers: Sequence[Buffer]) -> list[Buffer]:
    ids = {id(tensor) for tensor in metadata.tensors.values()}
    return [buffer for buffer in buffers if id(buffer.tensor) in ids and buffer.name.startswith("metadata")]


def _inputs_of(runner: DecodeRunner, metadata: Sequence[Buffer]) -> list[Buffer]:
    """Return the inputs of a runner, without those that the graph's refresh writes."""
    outputs = [buffer.tensor for buffer in metadata if buffer.kind == "output"]
    named = runner.inputs.named().items()
    return [Buffer(name, t, "input") for name, t in named if not any(overlap(t, other) for other in outputs)]


@contextmanager
def _steps(seen: Witness) -> Iterator[None]:
    """Check each step of a runner before it runs."""
    replay, uncaptured, run = DecodeRunner._replay, DecodeRunner._uncaptured, DecodeRunner.run

    def checked_replay(self: DecodeRunner, captured: Any, bucket: int, tokens: int) -> None:
        done = seen.step_of(self, f"{captured.what}, replayed", bucket, tokens)
        with seen.mode.paused():
            replay(self, captured, bucket, tokens)
        if done is not None:
            done()

    def checked_uncaptured(self: DecodeRunner, tokens: int) -> Any:
        done = seen.step_of(self, f"a step of {tokens} tokens without a graph", tokens, tokens)
        with seen.mode.paused():
            out = uncaptured(self, tokens)
        if done is not None:
            done()
        return out

    def marked_run(self: DecodeRunner, *args: Any, **kwargs: Any) -> Any:
        with seen.running(self):
            return run(self, *args, **kwargs)

    methods: dict[str, Callable[..., Any]] = {
        "_replay": checked_replay,
        "_uncaptured": checked_uncaptured,
        "run": marked_run,
    }
    with _replaced(DecodeRunner, methods):
        yield


@contextmanager
def _graphs(seen: Witness) -> Iterator[None]:
    """Check each replay of a compiled graph before it runs."""
    replay = CapturedGraph._replay

    def checked(self: CapturedGraph, entry: Any, args: tuple[Any, ...]) -> list[Any]:
        done = seen.graph_of(self, f"{entry.where}, replayed", args)
        with seen.mode.paused():
            out = replay(self, entry, args)
        if done is not None:
            done()
        return out

    with _replaced(CapturedGraph, {"_replay": checked}):
        yield


@contextmanager
def _warm_up(seen: Witness) -> Iterator[None]:
    """Take what warm-up and captures write, which they restore, for no writes."""

    def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with seen.mode.paused():
                return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for kind, names in (
            (DecodeRunner, ("plan", "warm_up")),
            (StandInGraphs, ("capture",)),
            (CudaGraphs, ("capture",)),
        ):
            stack.enter_context(_replaced(kind, {name: unseen(getattr(kind, name)) for name in names}))
        yield


@contextmanager
def _replaced(kind: type[Any], methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(kind, name) for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)
