"""What `explain` found, as plain data: one dataclass for each kind of row, and the report that holds them.

The JSON form is the dataclasses as they stand here, under `"schema": "dsv4.explain/1"`. Fields may be added to a
schema; when one is renamed, removed or changes its meaning, the number goes up.
"""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..errors import check

SCHEMA = "dsv4.explain/1"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code. `source` is its text, stripped; fields are empty or 0 where torch does not tell.

    As text it is short: relative to the working directory, or to the folder of installed packages.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""

    def __str__(self) -> str:
        if not self.file:
            return "unknown place"
        path = Path(self.file)
        roots = (Path.cwd(), Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.line}"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor or number that a graph takes. Dynamic dims read `s0=4`: symbol and the size seen first."""

    name: str
    shape: list[str]
    dtype: str
    dynamic: bool


@dataclass(slots=True)
class Graph:
    """One captured graph. `compile_id` is torch's name for it in its own logs, `0/1` for example."""

    index: int
    compile_id: str
    place: Place
    ops: dict[str, int]
    inputs: list[GraphInput]
    parameters: int

    @property
    def op_count(self) -> int:
        """Number of calls in the graph."""
        return sum(self.ops.values())


@dataclass(slots=True)
class Break:
    """A place where tracing stopped.

    Attributes:
        place: innermost line outside torch and the standard library.
        called_from: the line of the user's own code that led there, when `place` is in an installed package.
        kind: torch's name for the cause, stable enough to search for.
        scope: "function" when the whole function runs eagerly, "break" when the rest is compiled as another graph.
        seen: how often tracing stopped here; a line inside a called function is met once per caller.
    """

    place: Place
    kind: str
    cause: str
    fix: str
    scope: str = "break"
    seen: int = 1
    called_from: Place | None = None
    stack: list[str] = field(default_factory=list)
    detail: str = ""
    link: str = ""


@dataclass(slots=True)
class Recompile:
    """A guard that failed, in one function, over all calls.

    Attributes:
        guard: the check as torch words it the first time it failed.
        values: what was compiled for and then seen, in order.
        limit_hit: the function has used up torch's recompile limit and runs eagerly for new values.
    """

    place: Place
    guard: str
    cause: str
    fix: str
    values: list[str] = field(default_factory=list)
    count: int = 1
    limit_hit: bool = False


@dataclass(slots=True)
class OpDecision:
    """Calls of one dsv4 op that share an implementation: "ir", "triton", "eager", or "undecided" elsewhere."""

    op: str
    impl: str
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OpFusion:
    """Groups of ops, alike, that a pass merged into one op, or left apart for the same reason."""

    by: str
    ops: list[str]
    into: str
    merged: bool
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    """A kernel of the generated code: `kind` is "triton", "cpp" or "extern", `calls` its launches per graph call."""

    graph: int
    kind: str
    name: str
    calls: int


@dataclass(slots=True)
class CacheCopy:
    """A temporary as large as a mutated graph input: generated code copies the input in and back on each call."""

    graph: int
    argument: str
    shape: list[str]
    dtype: str
    bytes: int
    place: Place
    origin: str


@dataclass(slots=True)
class MissedReinplace:
    """Tensors that a graph clones before an op mutates them. Where the code itself clones them that is as it should."""

    graph: int
    tensors: int
    bytes: int


@dataclass(slots=True)
class CacheHazard:
    """A cache argument of an op with a dynamic dim: writes through a view may land at offset 0 (pytorch#198068)."""

    graph: int
    argument: str
    shape: list[str]
    op: str
    place: Place


@dataclass(slots=True)
class Failure:
    """The call raised. What was found before it did is still in the report."""

    type: str
    message: str
    place: Place


@dataclass(slots=True)
class Report:
    """The result of `explain`.

    `print(report)` shows it, `report.to_json()` and `report.save("report.html")` keep it. `report.ok` is true when
    the call compiled into graphs with nothing to complain of: no break, recompile, cache copy, hazard or failure.
    """

    target: str
    backend: str
    torch: str
    calls: int = 0
    seconds: float = 0.0
    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    decisions: list[OpDecision] = field(default_factory=list)
    fusions: list[OpFusion] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    cache_copies: list[CacheCopy] = field(default_factory=list)
    missed_reinplace: list[MissedReinplace] = field(default_factory=list)
    cache_hazards: list[CacheHazard] = field(default_factory=list)
    failure: Failure | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that costs speed or correctness."""
        found = (self.breaks, self.recompiles, self.cache_copies, self.cache_hazards)
        return self.failure is None and not any(found)

    def text(self, width: int = 96) -> str:
        """The report as plain text of at most `width` columns, long file names aside."""
        from .text import render

        return render(self, width)

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        from .text import render_rich

        return render_rich(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, `schema` first."""
        return {"schema": SCHEMA, "ok": self.ok, **dataclasses.asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote. Raises E201 for another schema."""
        data = json.loads(text)
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        check(got == SCHEMA, "E201", got=f"schema {got!r}", rule=f"a report has schema {SCHEMA!r}")
        return _build(cls, data)

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`: JSON, text or one self-contained HTML page, as .json, .txt or .html says."""
        from .html import render as render_html

        path = Path(path)
        renderers: dict[str, Callable[[], str]] = {
            ".json": self.to_json,
            ".txt": self.text,
            ".html": lambda: render_html(self),
        }
        check(
            path.suffix in renderers,
            "E201",
            got=f"path {str(path)!r}",
            rule="a report is saved as .json, .txt or .html",
            fix="end the path in one of these",
        )
        path.write_text(renderers[path.suffix](), encoding="utf-8")
        return path


def _build(kind: Any, value: Any) -> Any:
    """`value`, made of JSON's types, as an instance of the annotation `kind`."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name in value]
        return kind(**{name: _build(hints[name], value[name]) for name in names})
    if get_origin(kind) is list:
        return [_build(get_args(kind)[0], item) for item in value]
    options = [option for option in get_args(kind) if dataclasses.is_dataclass(option)]
    if options and value is not None:
        return _build(options[0], value)
    return value
