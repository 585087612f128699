"""The content of a rendered report: sections of tables and findings, the same for text and HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from ..attention_backends.registry import DECISION, SEPARATOR
from ..columns import clipped
from .rows import Break, Findings, Graph, GraphInput, OpDecision, OpFusion, Recompile

_OPS_SHOWN = 6
_PLACES_SHOWN = 3
_INPUTS_SHOWN = 12
_KERNELS_SHOWN = 12
_KERNEL_NAME = 64


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers. With `merge`, consecutive rows with equal last cells share one."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to fix: its place, the line of source, and labelled sentences.

    Attributes:
        count: rows of the report that it stands for; the numbers of later findings count them.
    """

    place: str
    aside: str
    source: str
    points: Sequence[tuple[str, str]]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the report."""

    title: str
    blocks: Sequence[Table | Finding]


def heading(report: Findings) -> str:
    """Return the line that says what was explained, and how."""
    calls = f"{_plural(report.calls, 'call')}, " if report.calls else ""
    return f"{report.target}  backend {report.backend}, torch {report.torch}, {calls}{report.seconds:.1f} s"


def verdict(report: Findings) -> str:
    """Return one line: "ok" and counts of graphs, or the problems to fix."""
    graphs = _plural(len(report.graphs), "graph")
    problems = [
        *(["failed"] if report.failure else []),
        *_counted(len(report.breaks), "graph break"),
        *_counted(sum(row.count for row in report.recompiles), "recompile"),
        *_counted(len(report.cache_copies), "cache copy", "cache copies"),
        *_counted(len(report.cache_hazards), "cache hazard"),
    ]
    return f"{', '.join(problems)}; {graphs}" if problems else f"ok; {graphs}, no break, no recompile"


def sections(report: Findings) -> Iterator[Section]:
    """Yield all sections that are not empty, most urgent first."""
    if report.failure:
        failure = report.failure
        points = [(failure.type, failure.message)]
        location = str(failure.place) if failure.place.file else report.target
        yield Section("The call failed", [Finding(location, "", failure.place.source, points)])
    if report.breaks:
        yield Section("Graph breaks, worst first", [_break(item) for item in report.breaks])
    if report.recompiles:
        yield Section("Recompiles", [_recompile(item) for item in report.recompiles])
    if report.cache_copies or report.missed_reinplace or report.cache_hazards:
        yield Section("Caches", list(_caches(report)))
    backends = [decision for decision in report.decisions if decision.op == DECISION]
    if backends:
        yield Section("Attention backend", [_backend(decision) for decision in backends])
    ops = [[d.op, str(d.count), _places(d.where), d.impl, d.reason] for d in report.decisions if d.op != DECISION]
    if ops:
        ops.sort(key=lambda row: row[::-1])
        yield Section("dsv4 ops", [Table(["op", "calls", "where", "impl", "reason"], ops, merge=True)])
    timed = [_costs(decision) for decision in report.decisions if decision.costs]
    if timed:
        yield Section(
            "Cost of dsv4 ops, all calls together",
            [Table(["op", "calls", "MB", "GFLOP", "floor on an H200, us", "measured here, us"], timed)],
        )
    if report.fusions:
        yield Section("Fused ops", _fusions(report.fusions))
    if report.dependent:
        launches = [[row.op, str(row.count), _places(row.where), row.reason] for row in report.dependent]
        yield Section("Not batch-invariant", [Table(["launch", "calls", "where", "why"], launches, merge=True)])
    if report.graphs:
        yield Section("Graphs", _graphs(report.graphs))
    if report.kernels:
        yield _kernels(report)
    if report.notes:
        yield Section("Notes", [Table([], [[note] for note in report.notes])])


def _backend(decision: OpDecision) -> Table:
    """Return the chosen backend, and every other one with the reason why it was not chosen."""
    chosen, *others = decision.reason.split(SEPARATOR)
    rows = [[decision.impl, str(decision.count), chosen]]
    for other in others:
        name, _, reason = other.partition(": ")
        rows.append([name, "not", reason])
    return Table(["backend", "layers", "reason"], rows)


def _costs(decision: OpDecision) -> list[str]:
    """Return the sums of bytes, flops, floors and times over the calls with a known cost."""
    costs = decision.costs
    times = [cost.measured_us for cost in costs if cost.measured_us is not None]
    measured = f"{sum(times):.1f}" if times else "-"
    if times and len(times) < len(costs):
        measured += f" for {len(times)}"
    flops = sum(cost.flops for cost in costs)
    return [
        decision.op,
        str(len(costs)),
        f"{sum(cost.bytes for cost in costs) / 1e6:.3f}",
        f"{flops / 1e9:.3f}" if flops else "-",
        f"{sum(cost.floor_us for cost in costs):.2f}",
        measured,
    ]


def _break(item: Break) -> Finding:
    effect = "the whole function runs eagerly" if item.scope == "function" else "the graph ends here"
    function = f"in {item.place.function}: " if item.place.function else ""
    points = [("cause", item.cause), ("fix", item.fix), ("torch", f"{item.kind}  {item.link}".strip())]
    if item.called_from:
        points.insert(0, ("called from", f"{item.called_from}  {item.called_from.source}"))
    seen = f", {item.seen} times" if item.seen > 1 else ""
    return Finding(str(item.place), f"{function}{effect}{seen}", item.place.source, points)


def _recompile(item: Recompile) -> Finding:
    points = [("cause", item.cause), ("fix", item.fix), ("guard", item.guard)]
    if item.values:
        points.insert(1, ("values", ", ".join(item.values)))
    if item.limit_hit:
        points.insert(0, ("limit", "torch's recompile limit is reached; new values run eagerly, without a warning"))
    return Finding(
        str(item.place), f"{item.place.function}, {_plural(item.count, 'recompile')}", item.place.source, points
    )


def _fusions(fusions: Sequence[OpFusion]) -> list[Finding]:
    """Return one finding for all groups of ops that a pass treats alike, for the same reason."""
    groups: dict[tuple[str, str, bool, str], list[OpFusion]] = {}
    for item in fusions:
        groups.setdefault((item.by, item.into, item.fused, item.reason), []).append(item)
    findings = []
    for (by, into, fused, reason), items in groups.items():
        count = _plural(sum(item.count for item in items), "group")
        ops = [("ops", ", ".join(ops)) for ops in dict.fromkeys(tuple(item.ops) for item in items)]
        where = _places([*dict.fromkeys(line for item in items for line in item.where)])
        points = [("why", reason), *ops, ("where", where)]
        findings.append(Finding(by, f"{count} {'fused' if fused else 'not fused'} into {into}", "", points))
    return findings


def _caches(report: Findings) -> Iterator[Finding]:
    for copy in report.cache_copies:
        what = f"`{copy.argument}` [{', '.join(copy.shape)}] {copy.dtype}, {copy.bytes / 2**20:.1f} MiB"
        points = [
            ("cause", f"{what}, is copied as a whole on each call, because {copy.origin or 'a write'} is not in place"),
            (
                "fix",
                "write the cache with an op of torch.ops.dsv4, or with one index_put_ on the cache itself, no view",
            ),
        ]
        yield Finding(str(copy.place), f"graph {copy.graph}: cache copied", copy.place.source, points)
    for missed in report.missed_reinplace:
        what = f"{_plural(missed.tensors, 'tensor')}, {missed.bytes / 2**20:.1f} MiB"
        points = [
            ("cause", f"{what}: the code clones it, or uses its old value after the op that writes it"),
            ("fix", "write the cache itself, and read it after the op rather than before"),
        ]
        yield Finding(f"graph {missed.graph}", "cloned before an op mutates it", "", points)
    for hazard in report.cache_hazards:
        points = [
            ("cause", f"`{hazard.argument}` [{', '.join(hazard.shape)}] of {hazard.op} has a dynamic dim"),
            (
                "fix",
                "torch._dynamo.mark_static(cache), and mark_dynamic only token dims, never dynamic=True; a write "
                "through a view of such a cache may land at offset 0 (pytorch#198068)",
            ),
        ]
        yield Finding(str(hazard.place), f"graph {hazard.graph}: dynamic cache", hazard.place.source, points)


def _graph(graph: Graph) -> Finding:
    parameters = [_plural(graph.parameters, "parameter")] if graph.parameters else []
    hidden = len(graph.inputs) - _INPUTS_SHOWN
    more = [f"{hidden} more"] if hidden > 0 else []
    inputs = ", ".join([*map(_input, graph.inputs[:_INPUTS_SHOWN]), *more, *parameters]) or "none"
    return Finding(
        str(graph.place),
        f"{graph.place.function}, {_plural(graph.op_count, 'op')}",
        "",
        [("inputs", inputs), ("ops", _ops(graph))],
    )


def _graphs(graphs: Sequence[Graph]) -> list[Finding]:
    """Return one finding for graphs that follow each other and are shown alike."""
    groups = [[*group] for _, group in groupby(map(_graph, graphs))]
    return [
        replace(group[0], aside=f"{group[0].aside}, {len(group)} times", count=len(group)) if group[1:] else group[0]
        for group in groups
    ]


def _input(entry: GraphInput) -> str:
    if entry.shape:
        return f"{entry.name} [{', '.join(entry.shape)}] {entry.dtype}"
    # A size that torch made a graph input has no other name than its symbol.
    return entry.dtype if re.fullmatch(r"s\d+", entry.name) else f"{entry.name} {entry.dtype}"


def _ops(graph: Graph) -> str:
    ops = sorted(graph.ops.items(), key=lambda item: (not item[0].startswith("dsv4."), -item[1]))
    shown = [f"{name} x{count}" if count > 1 else name for name, count in ops[:_OPS_SHOWN]]
    more = [_plural(len(ops) - _OPS_SHOWN, "more kind")] if len(ops) > _OPS_SHOWN else []
    return ", ".join([*shown, *more]) or "none"


def _kernels(report: Findings) -> Section:
    totals: Counter[str] = Counter()
    for kernel in report.kernels:
        totals[kernel.kind] += kernel.calls
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(totals.items()))
    frequent = sorted(report.kernels, key=lambda kernel: -kernel.calls)
    rows = [[str(k.graph), k.kind, str(k.calls), clipped(k.name, _KERNEL_NAME)] for k in frequent[:_KERNELS_SHOWN]]
    if len(frequent) > _KERNELS_SHOWN:
        rows.append(["", "", "", f"and {_plural(len(frequent) - _KERNELS_SHOWN, 'more kernel')}; to_json() has all"])
    return Section(f"Kernel launches: {summary}", [Table(["graph", "kind", "launches", "kernel"], rows)])


def _places(where: Sequence[str]) -> str:
    """Return file names and lines without folders, which are in the JSON."""
    more = f" +{len(where) - _PLACES_SHOWN}" if len(where) > _PLACES_SHOWN else ""
    return ", ".join(Path(path).name for path in where[:_PLACES_SHOWN]) + more


def _counted(number: int, one: str, many: str = "") -> list[str]:
    return [_plural(number, one, many)] if number else []


def _plural(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
