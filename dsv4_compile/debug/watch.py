"""Watch a compilation: every graph before its backend compiles it, the generated code, and torch's structured log.

The structured log (written by TORCH_TRACE and read by tlparse) is the only source that has every break, including those
before a graph has begun and those that end a whole function. A handler is attached to it only while `explain` runs.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from .. import progress
from ..runtime.repeated_layers import write_out, writes_out
from ..runtime.structured_log import TRACE, failed_guards
from ..selection import decisions
from . import graphs
from .breaks import RawBreak, parse_break
from .places import Place, function_name
from .recompiles import RawRecompile, explain_guard, split_reason
from .rows import CacheCopy, CacheHazard, Graph, Kernel, MissedReinplace, OpDecision

Backend = Callable[..., Any]

_GRAPH_BREAKS = "torch._dynamo.convert_frame.__graph_breaks"
_CONVERT_FRAME = "torch._dynamo.convert_frame"
_SILENCED = {
    "torch._dynamo.variables": logging.ERROR,
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}
"""Loggers with messages that the report words better, and the lowest level that they still print."""
_LIMIT = re.compile(r"'(.+)' \((.+):(\d+)\)$")


@dataclass(slots=True)
class Events:
    """Everything that torch logged, in order.

    Attributes:
        functions: the function of each compile id.
        limits: functions that have reached torch's recompile limit.
        started: compile ids of compilations that began inside the block.
    """

    breaks: list[RawBreak] = field(default_factory=list)
    recompiles: list[RawRecompile] = field(default_factory=list)
    functions: dict[str, Place] = field(default_factory=dict)
    limits: list[Place] = field(default_factory=list)
    started: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Watch:
    """Everything that was seen. With `keep_sources`, `captured` and `generated` hold each graph's sources by index.

    `observers` are called with the source that Inductor has generated, while its graph is being lowered.
    """

    events: Events
    stage: progress.Stage
    keep_sources: bool = False
    graphs: list[Graph] = field(default_factory=list)
    undecided: list[OpDecision] = field(default_factory=list)
    decided: decisions.Decisions = field(default_factory=decisions.Decisions)
    hazards: list[CacheHazard] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    copies: list[CacheCopy] = field(default_factory=list)
    missed: list[MissedReinplace] = field(default_factory=list)
    captured: dict[int, str] = field(default_factory=dict)
    generated: dict[int, str] = field(default_factory=dict)
    observers: list[Callable[[str], None]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)

    def backend(self, backend: str | Backend, **fixed: Any) -> Backend:
        """Return a backend that records each graph and passes it on to `backend`, with `fixed` arguments added."""
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        compiler = resolve(backend)

        def watched(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            from .._compat import RestartAnalysis

            seen: list[list[Any]] = [
                self.graphs,
                self.hazards,
                self.undecided,
                self.decided,
                self.decided.fusions,
                self.decided.dependent,
            ]
            counts = [len(rows) for rows in seen]
            written = write_out(gm, example_inputs)
            self._record_graph(written.gm, name)
            try:
                return written.as_traced(compiler(written.gm, written.example_inputs, **{**kwargs, **fixed}))
            except RestartAnalysis:
                # Dynamo traces again, with a float of the module as a constant, and discards this graph.
                for rows, count in zip(seen, counts, strict=True):
                    del rows[count:]
                raise

        options = fixed.get("options") or {}
        watched.writes_layers_out = lambda more: writes_out(compiler, {**more, **options})  # type: ignore[attr-defined]
        return watched

    def _record_graph(self, gm: GraphModule, backend: str) -> None:
        from .._compat import current_compile_id

        index = len(self.graphs) + 1
        self.stage.note(f"graph {index}")
        self._names = graphs.input_names(gm)
        self.graphs.append(graphs.describe(gm, index, current_compile_id()))
        self.hazards += graphs.hazards(gm, index)
        self.undecided += graphs.dsv4_calls(gm, f"backend {backend!r} runs the op as it is registered")
        if self.keep_sources:
            self.captured[index] = gm.print_readable(print_output=False)

    def record_code(self, code: str) -> None:
        """Record the source that Inductor has generated for the newest graph."""
        from .._compat import V

        for observer in self.observers:
            observer(code)
        index = len(self.graphs)
        if self.keep_sources:
            self.generated[index] = self.generated.get(index, "") + code
        self.kernels += graphs.read_kernels(code, index)
        self.copies += graphs.read_copies(V.graph, code, index, self._names)
        missed = graphs.read_missed(index)
        if missed:
            self.missed.append(missed)


@contextmanager
def watching(*, keep_sources: bool = False) -> Iterator[Watch]:
    """Watch everything that this thread compiles inside the block."""
    from .._compat import GraphLowering

    with _listen() as events, decisions.collect() as decided, progress.stage("compile") as stage:
        watch = Watch(events, stage, keep_sources, decided=decided)
        before, thread = GraphLowering.save_output_code, threading.get_ident()

        def save(code: str) -> None:
            if threading.get_ident() == thread:  # others compile too, and nobody explains them
                watch.record_code(code)
            if before is not None:
                before(code)

        GraphLowering.save_output_code = staticmethod(save)
        try:
            yield watch
        finally:
            GraphLowering.save_output_code = staticmethod(before) if before is not None else None


def resolve(backend: str | Backend) -> Backend:
    """Return the function that compiles for `backend`; it takes `mode` and `options` if the backend supports them."""
    if callable(backend):
        return backend
    if backend == "dsv4":
        from ..backend import dsv4

        return dsv4
    if backend == "inductor":
        return _inductor
    from .._compat import lookup_backend

    return lookup_backend(backend)  # type: ignore[no-any-return]


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Call Inductor with the arguments that torch.compile passes to other backends."""
    from .._compat import compile_fx, list_mode_options

    settings = dict(list_mode_options().get(mode, {})) if mode else {}
    settings |= {key.replace("-", "_"): value for key, value in (options or {}).items()}
    return compile_fx(gm, example_inputs, config_patches=settings)


@contextmanager
def _listen() -> Iterator[Events]:
    """Collect what torch logs inside the block; restore its logging afterwards."""
    events = Events()
    trace, converter = logging.getLogger(TRACE), logging.getLogger(_CONVERT_FRAME)
    handler, limit = _Handler(events), _LimitFilter(events)
    with ExitStack() as stack:
        # torch reports to the trace that a whole function is skipped only while this log is on.
        stack.enter_context(_silent_logger(_GRAPH_BREAKS, logging.DEBUG))
        for name, level in _SILENCED.items():
            stack.enter_context(_silent_logger(name, level))
        trace.addHandler(handler)
        stack.callback(trace.removeHandler, handler)
        converter.addFilter(limit)
        stack.callback(converter.removeFilter, limit)
        yield events


@contextmanager
def _silent_logger(name: str, level: int) -> Iterator[None]:
    """Set a logger to `level` without printing, unless the user has turned it on."""
    logger = logging.getLogger(name)
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    before = logger.level, logger.propagate
    silent = logging.NullHandler()
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Handler(logging.Handler):
    """Reads records of the structured log as they are emitted, while torch's frames are still on the stack."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.DEBUG)
        self.events, self.thread = events, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self.thread:
            return
        metadata: dict[str, Any] = getattr(record, "metadata", {})
        payload: str = getattr(record, "payload", None) or ""
        compile_id = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
        name = (metadata.get("artifact") or {}).get("name")
        if "dynamo_start" in metadata:
            self.events.started.add(compile_id)
        elif name == "dynamo_graph_break_reason":
            self.events.breaks.append(parse_break(payload))
        elif name == "recompile_reasons":
            self._recompile(compile_id, payload)
        elif "compilation_metrics" in metadata:
            metrics = metadata["compilation_metrics"]
            if metrics.get("co_name"):
                location = Place(metrics["co_filename"], metrics["co_firstlineno"], function_name(metrics["co_name"]))
                self.events.functions[compile_id] = location

    def _recompile(self, compile_id: str, payload: str) -> None:
        from .._compat import variables_of_traced_frame

        for reason in failed_guards(payload):
            before, guard = split_reason(reason)
            if before in self.events.started:
                failed = explain_guard(guard, variables_of_traced_frame())
                self.events.recompiles.append(RawRecompile(compile_id, failed))
                return


class _LimitFilter(logging.Filter):
    """Records that a function has reached its recompile limit, and drops torch's warning of it."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    def filter(self, record: logging.LogRecord) -> bool:
        if "hit config.%s" not in str(record.msg):
            return True
        for argument in record.args if isinstance(record.args, tuple) else ():
            match = _LIMIT.search(str(argument))
            if match:
                self.events.limits.append(Place(match[2], int(match[3]), function_name(match[1])))
                break
        return False
