"""What `explain` found, as plain data: the report, made of `rows`.

The JSON form is the dataclasses as they stand here, under `"schema": "dsv4.explain/1"`. Fields may be added to a
schema; when one is renamed, removed or changes its meaning, the number goes up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..errors import check
from .rows import (
    Break,
    CacheCopy,
    CacheHazard,
    Failure,
    Graph,
    Kernel,
    MissedReinplace,
    OpDecision,
    OpFusion,
    Recompile,
)

SCHEMA = "dsv4.explain/1"

_T = TypeVar("_T")


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
