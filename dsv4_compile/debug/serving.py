"""`compile_log`: what still compiles, is captured or is built after warm-up, when, and why.

    with dsv4_compile.debug.compile_log(report=print):
        serve()

A request with a shape that was never warmed up waits for a compilation. Each gets a line with its cause; `strict` makes
it an error before it begins.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import fail, is_installed
from ..kernels.host.build_hooks import describe_any_kernel
from ..runtime import early_builds
from ..runtime.captures import Call, Capture
from ..runtime.cuda_graphs import CudaGraphs
from ..runtime.standin import StandInGraphs
from ..runtime.structured_log import TRACE, failed_guards
from .places import Place, function_name
from .recompiles import explain_guard, split_reason

_EARLY = "built during the compilation of its graph"


@dataclass(frozen=True, slots=True)
class LateWork:
    """Something that warm-up should have done.

    Attributes:
        kind: "compile", "capture" or "kernel".
        what: function, capture or kernel.
        cause: which guard failed and how it is mended, or that it had never run.
        after: seconds since the log began.
        seconds: how long it took; None where that is not known.
        early: whether a thread built it while its graph compiled, so that nothing waited for it alone.
    """

    kind: str
    what: str
    cause: str
    after: float
    seconds: float | None = None
    early: bool = False

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        return f"{self.after:9.2f} s  {self.kind} {self.what}{took}: {self.cause}"


Report = Callable[[LateWork], Any]


@contextmanager
def compile_log(*, strict: bool = False, report: Report | None = None) -> Iterator[list[LateWork]]:
    """Log every compilation, capture and Triton build inside the block, of this thread; yield the growing list.

    Replays and calls that are compiled cost nothing more. Compiling itself writes a line of torch's structured log.

    Args:
        strict: raise E430 before such work begins, with its cause.
        report: called with each entry when it is complete.
    """
    log = _Log(strict, report)
    trace, handler = logging.getLogger(TRACE), _Handler(log)
    with ExitStack() as stack:
        trace.addHandler(handler)
        stack.callback(trace.removeHandler, handler)
        for kind in (CudaGraphs, StandInGraphs):
            stack.enter_context(_captures_of(kind, log))
        stack.enter_context(early_builds.listen(log.built))
        if sys.modules.get("triton") or (torch.cuda.is_available() and is_installed("triton")):
            stack.enter_context(_kernels(log))
        yield log.entries


class _Log:
    """Entries, and the error that `strict` makes of one that begins."""

    def __init__(self, strict: bool, report: Report | None) -> None:
        self.entries: list[LateWork] = []
        self._strict, self._report, self._started = strict, report, time.monotonic()
        self._thread = threading.get_ident()

    def begins(self, kind: str, what: str, cause: str) -> LateWork | None:
        """Return an entry for work that begins; None in other threads. E430 if the log is strict."""
        if threading.get_ident() != self._thread:
            return None
        if self._strict:
            fail("E430", got=f"{kind} {what}", why=cause)
        return LateWork(kind, what, cause, time.monotonic() - self._started)

    def ended(self, entry: LateWork, what: str = "") -> None:
        """Add an entry after its work has ended, with a better name if there is one."""
        took = time.monotonic() - self._started - entry.after
        complete = replace(entry, seconds=took, what=what or entry.what)
        self.entries.append(complete)
        if self._report is not None:
            self._report(complete)

    def built(self, kernel: early_builds.Built) -> None:
        """Add an entry for a kernel that was built while its graph compiled, or for one that failed then."""
        cause = f"its first launch builds it, because it failed before: {kernel.error}" if kernel.error else _EARLY
        after = time.monotonic() - self._started - kernel.seconds
        seconds = None if kernel.error else kernel.seconds
        self.entries.append(LateWork("kernel", kernel.name, cause, after, seconds, early=not kernel.error))
        if self._report is not None:
            self._report(self.entries[-1])


class CompileTrace(logging.Handler):
    """Reads begin and cause of compilations from torch's structured log; subclasses say what to do then."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._causes: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        metadata: dict[str, Any] = getattr(record, "metadata", {})
        compile_id = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
        if (metadata.get("artifact") or {}).get("name") == "recompile_reasons":
            self._causes[compile_id] = _cause(getattr(record, "payload", None) or "")
        elif "dynamo_start" in metadata:
            stack = metadata["dynamo_start"].get("stack") or [{}]
            name, line = function_name(str(stack[-1].get("name", "?"))), stack[-1].get("line", "?")
            self.started(compile_id, f"{name}, line {line}", self._causes.pop(compile_id, "it had not run before"))
        elif "compilation_metrics" in metadata:
            self.ended(compile_id, metadata["compilation_metrics"])

    def started(self, compile_id: str, what: str, cause: str) -> None:
        """Take the name of a function that compiles, and why."""

    def ended(self, compile_id: str, metrics: dict[str, Any]) -> None:
        """Take what torch counted of a compilation."""


class _Handler(CompileTrace):
    """Writes compilations into a log."""

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log
        self._open: dict[str, LateWork] = {}

    def started(self, compile_id: str, what: str, cause: str) -> None:
        """Open an entry."""
        entry = self._log.begins("compile", what, cause)
        if entry is not None:
            self._open[compile_id] = entry

    def ended(self, compile_id: str, metrics: dict[str, Any]) -> None:
        """Complete it."""
        if compile_id in self._open:
            location = Place(metrics.get("co_filename") or "", metrics.get("co_firstlineno") or 0)
            name = f"{function_name(metrics['co_name'])}, {location}" if metrics.get("co_name") else ""
            self._log.ended(self._open.pop(compile_id), name)


def _cause(payload: str) -> str:
    """Return cause and fix of the first guard of torch's list that failed."""
    from .._compat import variables_of_traced_frame

    _, guard = split_reason(failed_guards(payload)[0])
    failed = explain_guard(guard, variables_of_traced_frame())
    values = f", {failed.expected} before, now {failed.actual}" if failed.expected and failed.actual else ""
    return f"{failed.cause}{values}; {failed.fix}"


@contextmanager
def _captures_of(kind: type[CudaGraphs] | type[StandInGraphs], log: _Log) -> Iterator[None]:
    original: Callable[..., Capture] = kind.capture

    def capture(self: Any, call: Call, what: str) -> Capture:
        entry = log.begins("capture", what, "it had not been captured before")
        captured = original(self, call, what)
        if entry is not None:
            log.ended(entry)
        return captured

    kind.capture = capture  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.capture = original  # type: ignore[method-assign]


@contextmanager
def _kernels(log: _Log) -> Iterator[None]:
    """Log kernels that Triton builds: a launch of dtypes, alignments or constants that it has not seen."""
    from triton import knobs

    from ..kernels.host.launch import is_building

    begin, end = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    opened: list[LateWork] = []

    def before(*args: Any, **given: Any) -> Any:
        if not is_building():  # those are reported when they end
            entry = log.begins("kernel", str(given.get("repr", "?")), "Triton had not built it for such arguments")
            if entry is not None:
                opened.append(entry)
        return begin(*args, **given) if begin is not None else None

    def after(*args: Any, **given: Any) -> Any:
        if opened:
            log.ended(opened.pop())
        return end(*args, **given) if end is not None else None

    describe_any_kernel()
    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, after
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end
