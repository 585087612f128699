"""What torch says of itself while it compiles: breaks, recompiles and functions, read from its structured log.

The structured log (what TORCH_TRACE writes and tlparse reads) is the one account that has every break, those that a
graph has not begun before and those that end a whole function included. A handler on it costs nothing when explain()
does not run.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import guards
from .rows import Place

_TRACE = "torch.__trace"
_GRAPH_BREAKS = "torch._dynamo.convert_frame.__graph_breaks"
_CONVERT_FRAME = "torch._dynamo.convert_frame"
_SAID_BETTER_IN_THE_REPORT = {
    "torch._dynamo.variables": logging.ERROR,
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}

_HEADER = re.compile(r"^Graph [Bb]reak.* in user code at (.+):(\d+)$", re.MULTILINE)
_SKIPS = re.compile(r"[Ss]kipping the (?:function|frame)|results in a skip|skipping the rest of the function")
_FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+)\n(?: +(.*))?', re.MULTILINE)
_LINK = re.compile(r"please visit: (\S+)")
_LIMIT = re.compile(r"'(.+)' \((.+):(\d+)\)$")
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class RawBreak:
    """One report of a break: torch's words for it, and the user's stack, outermost call first."""

    kind: str
    explanation: str
    context: str
    hints: list[str]
    whole_function: bool
    stack: list[Place]
    link: str
    detail: str


@dataclass(frozen=True, slots=True)
class RawRecompile:
    """One recompile: torch's name of the new version, and the guard that failed of the newest version before it."""

    compile_id: str
    finding: guards.Finding


@dataclass(slots=True)
class Events:
    """Everything heard, in order. `functions` and `limits` say where a compile id, or a function at its limit, is."""

    breaks: list[RawBreak] = field(default_factory=list)
    recompiles: list[RawRecompile] = field(default_factory=list)
    functions: dict[str, Place] = field(default_factory=dict)
    limits: list[Place] = field(default_factory=list)
    started: set[str] = field(default_factory=set)


@contextmanager
def listen() -> Iterator[Events]:
    """Hear what torch compiles inside the block. Logging is as it was after it."""
    events = Events()
    trace, converter = logging.getLogger(_TRACE), logging.getLogger(_CONVERT_FRAME)
    handler, limit = _Handler(events), _LimitFilter(events)
    with ExitStack() as stack:
        # torch tells the trace that a whole function is skipped only while this log is on.
        stack.enter_context(_logger_set(_GRAPH_BREAKS, logging.DEBUG))
        for name, level in _SAID_BETTER_IN_THE_REPORT.items():
            stack.enter_context(_logger_set(name, level))
        trace.addHandler(handler)
        stack.callback(trace.removeHandler, handler)
        converter.addFilter(limit)
        stack.callback(converter.removeFilter, limit)
        yield events


@contextmanager
def _logger_set(name: str, level: int) -> Iterator[None]:
    """A logger at `level` that prints nothing, unless the user has turned it on."""
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
    """Reads records of the structured log as they are made, on the stack of what torch is doing."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.DEBUG)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
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
                place = Place(metrics["co_filename"], metrics["co_firstlineno"], function_name(metrics["co_name"]))
                self.events.functions[compile_id] = place

    def _recompile(self, compile_id: str, payload: str) -> None:
        from .._compat import variables_of_traced_frame

        reasons = json.loads(payload) if payload.startswith("[") else [payload]
        for reason in reasons:
            failed, guard = guards.split(reason)
            if failed in self.events.started:
                finding = guards.read(guard, variables_of_traced_frame())
                self.events.recompiles.append(RawRecompile(compile_id, finding))
                return


class _LimitFilter(logging.Filter):
    """Notes that a function has reached its recompile limit, and keeps torch's warning of it from the terminal."""

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


def parse_break(text: str) -> RawBreak:
    """Read torch's account of a break: header, reason, explanation, hints, context, and the user's stack."""
    body, _, tail = text.partition("User code traceback:")
    stack_text = tail.partition("\nTraceback (most recent call last)")[0]
    if not tail:
        stack_text = text.partition("following user code:")[2].partition("\nTraceback (most recent call last)")[0]
    stack = read_stack(stack_text)
    header = _HEADER.search(body)
    if header and not (stack and (stack[-1].file, stack[-1].line) == (header[1], int(header[2]))):
        stack.append(Place(header[1], int(header[2])))
    reason = body.partition("Graph Break Reason:")[2].partition("*** While handling")[0]
    kind, explanation, hints, context = parts(reason)
    link = _LINK.search(reason)
    return RawBreak(
        kind=kind or _last_line(text),
        explanation=explanation,
        context=context,
        hints=hints,
        whole_function=_SKIPS.search(body) is not None,
        stack=stack,
        link=link[1] if link else "",
        detail=reason.strip(),
    )


def read_stack(text: str) -> list[Place]:
    """Frames of a traceback in torch's text, outermost first."""
    return [Place(f, int(n), function_name(fn), source or "") for f, n, fn, source in _FRAME.findall(text)]


def parts(reason: str) -> tuple[str, str, list[str], str]:
    """Kind, explanation, hints and context of a reason. The kind is the line above "Explanation:"."""
    head, _, rest = reason.partition("Explanation:")
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    kind = lines[-1] if lines else ""
    rest, _, context = rest.partition("Developer debug context:")
    explanation, *hints = re.split(r"\n\s*Hint: ", rest)
    context = context.partition("\n\n")[0]
    return kind, explanation.strip(), [" ".join(hint.split()) for hint in hints], context.strip()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith(_INDENT)]
    return lines[-1] if lines else "graph break"


def function_name(name: str) -> str:
    """The user's function that a frame runs: what resumes after a break is named after the function it is part of."""
    match = re.fullmatch(r"(?:torch_dynamo_)?resume_in_(.+)_at_\d+", name)
    return match[1] if match else name


def is_torch(file: str) -> bool:
    """Whether `file` belongs to torch."""
    import torch

    return Path(file).is_relative_to(Path(torch.__file__).parent)
