"""Graph breaks of a report: where in the user's code, once each, the costly ones first."""

from __future__ import annotations

import linecache
import re
import site
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from .causes import explain_break
from .events import RawBreak, is_torch
from .rows import Break, Place

_DECORATOR_LINES = 20


def collect(raw: Iterable[RawBreak], limits: Iterable[Place] = ()) -> list[Break]:
    """Breaks by place and cause. Whole functions that run eagerly come first, then what is met most often."""
    found: dict[tuple[str, int, str], Break] = {}
    for new in [*map(_describe, raw), *map(_at_limit, limits)]:
        kept = found.setdefault((new.place.file, new.place.line, new.cause), new)
        if kept is not new:
            kept.seen += 1
            kept.scope = "function" if "function" in (kept.scope, new.scope) else "break"
    return sorted(found.values(), key=lambda b: (b.scope != "function", -b.seen))


def _describe(item: RawBreak) -> Break:
    place = innermost(item.stack)
    library = _library_called(item.stack, place)
    cause, fix = explain_break(item.kind, item.explanation, item.context, item.hints, place.file, library)
    caller = None
    if _is_installed(place.file):
        callers = [frame for frame in item.stack if not _is_installed(frame.file) and not _is_ours_or_torch(frame.file)]
        caller = with_source(callers[-1]) if callers else None
    return Break(
        place=with_source(place),
        kind=item.kind,
        cause=cause,
        fix=fix,
        scope="function" if item.whole_function else "break",
        called_from=caller,
        stack=[f"{frame.file}:{frame.line} in {frame.function}" for frame in item.stack],
        detail=item.detail,
        link=item.link,
    )


def _at_limit(place: Place) -> Break:
    kind = "Dynamo recompile limit exceeded"
    cause, fix = explain_break(kind, "", "", [], place.file)
    return Break(definition(place), kind, cause, fix, scope="function")


def innermost(stack: list[Place]) -> Place:
    """The innermost frame outside torch and the standard library, or the innermost at all."""
    for frame in reversed(stack):
        if not _is_ours_or_torch(frame.file) and not _is_standard(frame.file):
            return frame
    return stack[-1] if stack else Place()


def _library_called(stack: list[Place], place: Place) -> str:
    """Module of the standard library that is called at `place`, where the break is inside it; else ""."""
    inner = stack[stack.index(place) + 1 :] if place in stack else []
    frame = next((frame for frame in inner if _is_standard(frame.file)), None)
    if frame is None:
        return ""
    module = Path(frame.file).relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    return ".".join(part for part in module if part != "__init__")


def with_source(place: Place) -> Place:
    """`place` with the text of its line, which torch's traceback may cut or colour."""
    line = linecache.getline(place.file, place.line).strip()
    return replace(place, source=line or place.source)


def definition(place: Place) -> Place:
    """The `def` line of the function that starts at `place`, which is its first decorator's line for Python."""
    for line in range(place.line, place.line + _DECORATOR_LINES):
        source = linecache.getline(place.file, line).strip()
        if re.match(r"(async )?def |.*\blambda\b", source):
            return replace(place, line=line, source=source)
        if not source:
            break
    return with_source(place)


@cache
def _site_packages() -> tuple[Path, ...]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    return tuple(Path(path) for path in paths if path)


def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(root) for root in _site_packages())


def _is_standard(file: str) -> bool:
    return Path(file).is_relative_to(sysconfig.get_path("stdlib")) and not _is_installed(file)


def _is_ours_or_torch(file: str) -> bool:
    return is_torch(file) or Path(file).is_relative_to(Path(__file__).parent)
