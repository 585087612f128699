"""Recompiles of a report: one row for each guard of a function, with the values that went through it."""

from __future__ import annotations

from collections.abc import Iterable

from .breaks import definition
from .events import Events
from .rows import Place, Recompile


def collect(events: Events) -> list[Recompile]:
    """Failed guards by function and guarded value, the most frequent first."""
    found: dict[tuple[str, int, str], Recompile] = {}
    limits = {(place.file, place.line) for place in events.limits}
    for raw in events.recompiles:
        place = _place(raw.compile_id, events)
        finding = raw.finding
        key = (place.file, place.line, finding.key)
        row = found.get(key)
        if row is None:
            row = Recompile(definition(place), finding.guard, finding.cause, finding.fix, count=0)
            row.limit_hit = (place.file, place.line) in limits
            found[key] = row
        row.count += 1
        _extend(row.values, [finding.expected, finding.actual])
    return sorted(found.values(), key=lambda r: (not r.limit_hit, -r.count))


def _place(compile_id: str, events: Events) -> Place:
    """The function of a compilation. One that torch refused is not in its log, but an earlier version of it is."""
    function = compile_id.split("/")[0]
    known = [place for name, place in events.functions.items() if name.split("/")[0] == function]
    return events.functions.get(compile_id) or (known[0] if known else Place())


def _extend(values: list[str], more: Iterable[str]) -> None:
    for value in more:
        if value and value not in values:
            values.append(value)
