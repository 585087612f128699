"""The report of `explain_replay`, shown as text, JSON or one HTML page with a timeline.

The JSON form is the dataclasses of `rows`, under `"schema": "dsv4.replay/1"`, with the rules of the report of breaks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...columns import DEFAULT_WIDTH, clipped
from ...errors import check
from ..render import page_text
from ..report import read_json, save
from ..sections import Section, Table
from .diff import NOISE_SHARE, Difference, compare
from .page import html
from .rows import PARTS, Node, Replay, Total

SCHEMA = "dsv4.replay/1"
MOST_NODES = 10_000
"""Nodes of a record that is read: a step of the largest model has half as many."""
MOST_EDGES = 10 * MOST_NODES
_KERNEL_NAME = 48
_SAVED = "report.save('replay.html') writes a page with a timeline, '.json' a record for `dsv4 explain --diff`."


@dataclass(slots=True)
class ReplayReport(Replay):
    """The result of `explain_replay`: one row for each node of a captured graph.

    `print(report)` shows it, `report.save("replay.html")` draws it, `report.save("replay.json")` keeps it for a diff.
    """

    def text(self, width: int = DEFAULT_WIDTH) -> str:
        """Return the report as plain text of at most `width` columns, except for long names."""
        saved = Section("Saved", [Table([], [[_SAVED]])])
        return page_text([heading(self), verdict(self)], [*sections(self), saved], width)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, `schema` first."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> ReplayReport:
        """Return the report that `to_json` wrote. Raises E201 for any other schema, and for nodes that cannot be."""
        report: ReplayReport = read_json(cls, text, SCHEMA)
        nodes = report.nodes
        known = report.graphs in NOISE_SHARE and len(nodes) <= MOST_NODES
        got = f"{len(nodes)} nodes of graphs {clipped(repr(report.graphs), _KERNEL_NAME)}"
        check(known, "E201", got=got, rule=f"at most {MOST_NODES} nodes, of graphs {' or '.join(NOISE_SHARE)}")
        edges = sum(len(node.after) for node in nodes)
        check(edges <= MOST_EDGES, "E201", got=f"{edges} edges", rule=f"a record has at most {MOST_EDGES} edges")
        for i, node in enumerate(nodes):
            got = f"node {i} with index {node.index}, part {clipped(repr(node.part), _KERNEL_NAME)}"
            check(node.index == i and node.part in PARTS, "E201", got=got, rule="nodes in order, of a known part")
            after = [edge.node for edge in node.after if not 0 <= edge.node < len(nodes)]
            check(not after, "E201", got=f"node {i} after node {after[:1]}", rule="edges between nodes of the report")
        return report

    def diff(self, old: Replay) -> Difference:
        """Return the difference from the replay `old`: nodes added, removed, slower, and with other shapes."""
        return compare(old, self)

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`: JSON, text or one self-contained HTML page, for .json, .txt or .html."""
        tables = [section for section in sections(self) if section.title != "Nodes"]
        page = {".html": lambda: html(self, heading(self), verdict(self), tables)}
        return save(path, {".json": self.to_json, ".txt": self.text, **page})


def heading(report: Replay) -> str:
    """Return the line that says what was captured, and where."""
    graph = "CUDA graph" if report.graphs == "cuda" else "stand-in for a CUDA graph"
    return f"{report.target}  {graph} of {report.what}, backend {report.backend}, torch {report.torch}, {report.device}"


def verdict(report: Replay) -> str:
    """Return one line: nodes, time and floor of a replay."""
    parts = [f"{len(report.nodes)} {'nodes' if report.graphs == 'cuda' else 'calls'}"]
    if report.replay_us is not None:
        parts.append(f"{report.replay_us:.1f} us a replay")
    if report.us is not None:
        gaps = sum(node.gap_us or 0.0 for node in report.nodes)
        parts.append(f"{report.us:.1f} us by node, {gaps:.1f} of it between nodes")
    known = sum(node.floor_us is not None for node in report.nodes)
    parts.append(f"floor {report.floor_us:.1f} us of {known} nodes whose cost is known")
    if report.breaks or report.recompiles:
        parts.append(f"{report.breaks} graph breaks, {report.recompiles} recompiles")
    return "; ".join(parts)


def sections(report: Replay) -> Iterator[Section]:
    """Yield all sections that are not empty."""
    kinds = [("Time by part", "part"), ("Time by layer", "layer"), ("Time by op", "op")]
    if any(node.stage for node in report.nodes):
        kinds.insert(0, ("Time by stage", "stage"))
    for title, by in kinds:
        totals = report.totals(by)
        if totals:
            yield Section(title, [_totals(by, totals)])
    most = report.most_to_win()
    if most:
        yield Section("Most to win", [_table(most)])
    if report.nodes:
        yield Section("Nodes", [_table(report.nodes), _launches(report.nodes)])
    if report.notes:
        yield Section("Notes", [Table([], [[note] for note in report.notes])])


def _totals(by: str, totals: Sequence[Total]) -> Table:
    headers = ["us", "floor", "above it", "nodes", by]
    rows = [[f"{t.us:.1f}", f"{t.floor_us:.1f}", f"{t.win_us:.1f}", str(t.nodes), t.name] for t in totals]
    return Table(headers, rows)


def _table(nodes: Sequence[Node]) -> Table:
    headers = ["node", "us", "gap", "floor", "MB", "op", "kernel", "line"]
    rows = [
        [
            str(node.index),
            number(node.us),
            number(node.gap_us),
            number(node.floor_us),
            number(None if node.bytes is None else node.bytes / 1e6),
            node.op,
            "" if node.name == node.op else clipped(node.name, _KERNEL_NAME),
            place_text(node),
        ]
        for node in nodes
    ]
    return Table(headers, rows)


def _launches(nodes: Sequence[Node]) -> Table:
    headers = ["node", "grid", "block", "shared", "registers", "stream", "after", "layer"]
    rows = [
        [
            str(node.index),
            dims(node.grid),
            dims(node.block),
            "-" if node.shared_bytes is None else str(node.shared_bytes),
            "-" if node.registers is None else str(node.registers),
            str(node.stream),
            after(node),
            node.layer or "-",
        ]
        for node in nodes
    ]
    return Table(headers, rows)


def place_text(node: Node) -> str:
    """Return the line of a node, and of its caller if that is in a different file."""
    if not node.place.file:
        return "-"
    return str(node.place) + (f" < {Path(node.caller.file).name}:{node.caller.line}" if node.caller.file else "")


def number(value: float | None) -> str:
    """Return a number with two digits after the point, or "-" for None."""
    return "-" if value is None else f"{value:.2f}"


def dims(size: Sequence[int]) -> str:
    """Return "132x1x1" for the three dims of a launch, "-" where the driver does not tell."""
    return "x".join(map(str, size)) or "-"


def after(node: Node) -> str:
    """Return the numbers of the nodes that `node` waits for; those of programmatic edges have a `p`."""
    return " ".join(f"{edge.node}{'p' if edge.programmatic else ''}" for edge in node.after) or "-"
