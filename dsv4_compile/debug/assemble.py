"""From what was watched to a report."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import torch

from ..decisions import Decision
from . import breaks, recompiles
from .observe import Watch
from .report import Failure, OpDecision, Place, Report


def assemble(watch: Watch, *, target: str, backend: str) -> Report:
    """The report of everything in `watch`; calls, time and failure are for the caller to add."""
    report = Report(
        target=target,
        backend=backend,
        torch=torch.__version__,
        graphs=watch.graphs,
        breaks=breaks.collect(watch.events.breaks, watch.events.limits),
        recompiles=recompiles.collect(watch.events),
        decisions=merge(watch.undecided if not watch.decided else map(_row, watch.decided)),
        kernels=watch.kernels,
        cache_copies=watch.copies,
        missed_reinplace=watch.missed,
        cache_hazards=watch.hazards,
    )
    for graph in report.graphs:
        graph.place = breaks.with_source(watch.events.functions.get(graph.compile_id, graph.place))
    if not report.graphs and not report.breaks:
        report.notes.append("No graph was captured: the code that ran has no tensor operation that torch traces.")
    return report


def merge(rows: Iterable[OpDecision]) -> list[OpDecision]:
    """Rows of one op, implementation and reason become one, with their places lined up."""
    found: dict[tuple[str, str, str], OpDecision] = {}
    for row in rows:
        kept = found.setdefault((row.op, row.impl, row.reason), OpDecision(row.op, row.impl, row.reason, count=0))
        kept.count += row.count
        kept.where += [place for place in row.where if place not in kept.where]
    return sorted(found.values(), key=lambda row: (row.op, row.impl))


def failure_of(error: BaseException) -> Failure:
    """`error` with the innermost line of the user's code that it passed through."""
    frames = [Place(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return Failure(type(error).__name__, str(error).strip(), breaks.with_source(breaks.innermost(frames)))


def _row(decision: Decision) -> OpDecision:
    file, _, line = decision.where.rpartition(":")
    where = [str(Place(file, int(line)))] if file else []
    return OpDecision(decision.op, decision.impl, decision.reason, where=where)
