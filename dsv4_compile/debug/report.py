"""The report of `explain`: built from the records of `watch`, and shown as text, JSON or HTML.

The JSON form is the dataclasses of `rows`, under `"schema": "dsv4.explain/1"`. A release may add fields to a schema;
one that renames or removes a field, or changes its meaning, raises the number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from ..attention_backends.registry import selections
from ..columns import DEFAULT_WIDTH
from ..errors import DSV4Error, check, error
from ..selection import costs
from ..selection.decisions import Decision, Dependence, Fusion
from . import breaks, recompiles, render
from .places import Place, definition, innermost, is_torch, read_stack, with_source
from .rows import Failure, Findings, OpCost, OpDecision, OpDependence, OpFusion
from .watch import Watch

SCHEMA = "dsv4.explain/1"
_LARGEST = 1e18
_SHOWN = 60
"""Characters of a wrong value that an error shows."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(slots=True)
class Report(Findings):
    """The result of `explain`.

    `print(report)` shows it, `report.to_json()` and `report.save("report.html")` keep it. `report.ok` is true when
    the call compiled into graphs without a break, recompile, cache copy, hazard or failure.
    """

    def text(self, width: int = DEFAULT_WIDTH) -> str:
        """Return the report as plain text of at most `width` columns, except for long file names."""
        return render.text(self, width)

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        return render.rich_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, `schema` first."""
        return {"schema": SCHEMA, "ok": self.ok, **dataclasses.asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote. Raises E201 for any other schema."""
        report: Report = read_json(cls, text, SCHEMA)
        return report

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`: JSON, text or one self-contained HTML page, for .json, .txt or .html."""
        return save(path, {".json": self.to_json, ".txt": self.text, ".html": lambda: render.html(self)})


def save(path: str | Path, renderers: Mapping[str, Callable[[], str]]) -> Path:
    """Write what the renderer of its suffix returns to `path`: .json, .txt or .html, or E201."""
    path = Path(path)
    check(
        path.suffix in renderers,
        "E201",
        got=f"path {str(path)!r}",
        rule="a report is saved as .json, .txt or .html",
        fix="end the path in one of these",
    )
    # Names of files may have bytes that are no text, which Python keeps as halves of pairs.
    path.write_text(renderers[path.suffix](), encoding="utf-8", errors="backslashreplace")
    return path


def read_json(kind: type[Any], text: str, schema: str) -> Any:
    """Return the dataclass `kind` that was written as JSON with "schema".

    Raises E201 for any other schema, for text that is not JSON, and for values of other types than the fields.
    """
    try:
        data = json.loads(text, parse_constant=_not_finite)
    except (ValueError, RecursionError) as fault:
        why = "" if isinstance(fault, RecursionError) else str(fault)
        raise error("E201", got="text that is not JSON", why=why, rule=f"a report has schema {schema!r}") from None
    got = data.get("schema") if isinstance(data, dict) else type(data).__name__
    check(got == schema, "E201", got=f"schema {str(got)[:_SHOWN]!r}", rule=f"a report has schema {schema!r}")
    return _build(kind, data, "the report")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields: their texts are compiled, and a record has thousands of objects."""
    return get_type_hints(kind)


def _build(kind: Any, value: Any, where: str) -> Any:
    """Return `value`, made of JSON's types, as an instance of the annotation `kind`. E201 for any other type."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _build(next(item for item in options if item is not NoneType), value, where)
    if dataclasses.is_dataclass(kind):
        _expect(isinstance(value, dict), value, "an object", where)
        hints, fields = _hints(kind), dataclasses.fields(kind)  # type: ignore[arg-type]
        plain = (item for item in fields if item.default is MISSING and item.default_factory is MISSING)
        missing = [item.name for item in plain if item.name not in value]
        _expect(not missing, missing, "an object with these fields", where)
        names = [item.name for item in fields if item.name in value]
        return kind(**{name: _build(hints[name], value[name], f"{where}, {name}") for name in names})  # type: ignore[operator]
    if origin is list:
        _expect(isinstance(value, list), value, "a list", where)
        return [_build(options[0], item, f"{where}, entry {i}") for i, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), value, "an object", where)
        return {name: _build(options[1], item, f"{where}, {name[:_SHOWN]}") for name, item in value.items()}
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
    if kind is float:
        _expect(number, value, "a finite number", where)
    elif kind is int:
        _expect(number and isinstance(value, int), value, "an integer", where)
    else:
        _expect(isinstance(value, kind), value, f"of type {kind.__name__}", where)
    return value


def _expect(holds: bool, value: Any, what: str, where: str) -> None:
    check(holds, "E201", got=f"{where} is {str(value)[:_SHOWN]!r}", rule=f"it is {what}, as reports are written")


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def assemble(
    watch: Watch, *, target: str, backend: str, seconds: float, calls: int = 0, failure: Failure | None = None
) -> Report:
    """Return the report of everything in `watch`."""
    report = Report(
        target=target,
        backend=backend,
        torch=torch.__version__,
        calls=calls,
        seconds=round(seconds, 3),
        failure=failure,
        graphs=watch.graphs,
        breaks=breaks.collect(watch.events.breaks, watch.events.limits),
        recompiles=recompiles.collect(watch.events.recompiles, watch.events.functions, watch.events.limits),
        decisions=_group_decisions(watch.undecided if not watch.decided else map(_decision_row, watch.decided)),
        fusions=_group_fusions(watch.decided.fusions),
        dependent=_group_dependent(watch.decided.dependent),
        kernels=watch.kernels,
        cache_copies=watch.copies,
        missed_reinplace=watch.missed,
        cache_hazards=watch.hazards,
    )
    for graph in report.graphs:
        if graph.compile_id in watch.events.functions:
            graph.place = definition(watch.events.functions[graph.compile_id])
    if not (report.graphs or report.breaks or failure):
        report.notes.append("No graph was captured: the code that ran has no tensor operation that torch traces.")
    return report


def backend_decisions(target: object) -> list[OpDecision]:
    """Return a row for each attention backend that a module of `target` has selected."""
    return _group_decisions(map(_decision_row, selections(target)))


def failure_of(error: BaseException) -> Failure:
    """Return the row of an exception, at the line of the user's code that it came from."""
    ours = next((cause for cause in _chain(error) if isinstance(cause, DSV4Error)), None)
    text, _, traced = str(error).partition("\nfrom user code:")
    frames = read_stack(traced)
    if not frames:
        frames = [Place(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
        frames = [frame for frame in frames if not Path(frame.file).is_relative_to(_PACKAGE)]
    if ours is None and "Explanation:" in text:
        kind, explanation, _, _ = breaks.parse_reason(text)
        text = f"{kind}: {explanation}"
    text = text.partition("\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    shown = ours or error
    location = innermost(frames)
    return Failure(
        type(shown).__name__, str(ours or text), Place() if is_torch(location.file) else with_source(location)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the exceptions it was raised from, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__


def _group_decisions(rows: Iterable[OpDecision]) -> list[OpDecision]:
    """Return one row for each op, implementation and reason, with all their places and costs."""
    groups: dict[tuple[str, str, str], OpDecision] = {}
    for row in rows:
        group = groups.setdefault((row.op, row.impl, row.reason), OpDecision(row.op, row.impl, row.reason, count=0))
        group.count += row.count
        group.where += [location for location in row.where if location not in group.where]
        group.costs += row.costs
    return sorted(groups.values(), key=lambda row: (row.op, row.impl))


def _group_fusions(fusions: Iterable[Fusion]) -> list[OpFusion]:
    """Return one row for each pass, group of ops, outcome and reason, in the order of their first group."""
    groups: dict[tuple[object, ...], OpFusion] = {}
    for fusion in fusions:
        key = (fusion.by, fusion.ops, fusion.into, fusion.fused, fusion.reason)
        new = OpFusion(fusion.by, list(fusion.ops), fusion.into, fusion.fused, fusion.reason, count=0)
        group = groups.setdefault(key, new)
        group.count += 1
        group.where += [location for location in _short_place(fusion.where) if location not in group.where]
    return list(groups.values())


def _group_dependent(dependent: Iterable[Dependence]) -> list[OpDependence]:
    """Return one row for each op and reason, with all their places."""
    groups: dict[tuple[str, str], OpDependence] = {}
    for one in dependent:
        group = groups.setdefault((one.op, one.reason), OpDependence(one.op, one.reason, count=0))
        group.count += 1
        group.where += [location for location in _short_place(one.where) if location not in group.where]
    return sorted(groups.values(), key=lambda row: (row.reason, row.op))


def _decision_row(decision: Decision) -> OpDecision:
    row = OpDecision(decision.op, decision.impl, decision.reason, where=_short_place(decision.where))
    cost = decision.cost
    if cost is not None:
        floor = round(costs.floor_us(cost, costs.H200), 3)
        row.costs.append(OpCost(cost.bytes, cost.flops, floor, decision.measured_us))
    return row


def _short_place(where: str) -> list[str]:
    """Return "file:line" as the report prints places, or nothing where it is not known."""
    file, _, line = where.rpartition(":")
    return [str(Place(file, int(line)))] if file else []
