"""From what was watched to a report."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..attention_backends.registry import selections
from ..errors import DSV4Error
from ..selection import costs
from ..selection.decisions import Decision, Fusion
from . import breaks, events, recompiles
from .observe import Watch
from .report import Report
from .rows import Failure, OpCost, OpDecision, OpFusion, Place

_PACKAGE = Path(__file__).parents[1]


def assemble(
    watch: Watch, *, target: str, backend: str, seconds: float, calls: int = 0, failure: Failure | None = None
) -> Report:
    """The report of everything in `watch`."""
    report = Report(
        target=target,
        backend=backend,
        torch=torch.__version__,
        calls=calls,
        seconds=round(seconds, 3),
        failure=failure,
        graphs=watch.graphs,
        breaks=breaks.collect(watch.events.breaks, watch.events.limits),
        recompiles=recompiles.collect(watch.events),
        decisions=merge(watch.undecided if not watch.decided else map(_row, watch.decided)),
        fusions=_alike(watch.decided.fusions),
        kernels=watch.kernels,
        cache_copies=watch.copies,
        missed_reinplace=watch.missed,
        cache_hazards=watch.hazards,
    )
    for graph in report.graphs:
        if graph.compile_id in watch.events.functions:
            graph.place = breaks.definition(watch.events.functions[graph.compile_id])
    if not (report.graphs or report.breaks or failure):
        report.notes.append("No graph was captured: what ran has no tensor operation that torch traces.")
    return report


def chosen_backends(target: object) -> list[OpDecision]:
    """One row for each attention backend that a module of `target` has selected."""
    return merge(map(_row, selections(target)))


def merge(rows: Iterable[OpDecision]) -> list[OpDecision]:
    """Rows of one op, implementation and reason become one, with their places lined up."""
    found: dict[tuple[str, str, str], OpDecision] = {}
    for row in rows:
        kept = found.setdefault((row.op, row.impl, row.reason), OpDecision(row.op, row.impl, row.reason, count=0))
        kept.count += row.count
        kept.where += [place for place in row.where if place not in kept.where]
        kept.costs += row.costs
    return sorted(found.values(), key=lambda row: (row.op, row.impl))


def _alike(fusions: Iterable[Fusion]) -> list[OpFusion]:
    """Fusions of the same ops with the same outcome become one row, in the order in which they were met."""
    found: dict[tuple[object, ...], OpFusion] = {}
    for fusion in fusions:
        key = (fusion.by, fusion.ops, fusion.into, fusion.merged, fusion.reason)
        new = OpFusion(fusion.by, list(fusion.ops), fusion.into, fusion.merged, fusion.reason, count=0)
        kept = found.setdefault(key, new)
        kept.count += 1
        kept.where += [place for place in _shown(fusion.where) if place not in kept.where]
    return list(found.values())


def failure_of(error: BaseException) -> Failure:
    """What went wrong in a call, at the line of the user's code that it came from."""
    ours = next((cause for cause in _causes(error) if isinstance(cause, DSV4Error)), None)
    text, _, traced = str(error).partition("\nfrom user code:")
    frames = events.read_stack(traced)
    if not frames:
        frames = [Place(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
        frames = [frame for frame in frames if not Path(frame.file).is_relative_to(_PACKAGE)]
    if ours is None and "Explanation:" in text:
        kind, explanation, _, _ = events.parts(text)
        text = f"{kind}: {explanation}"
    text = text.partition("\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    shown = ours or error
    place = breaks.innermost(frames)
    return Failure(
        type(shown).__name__, str(ours or text), Place() if events.is_torch(place.file) else breaks.with_source(place)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__


def _row(decision: Decision) -> OpDecision:
    found, cost = OpDecision(decision.op, decision.impl, decision.reason, where=_shown(decision.where)), decision.cost
    if cost is not None:
        floor = round(costs.floor_us(cost, costs.H200), 3)
        found.costs.append(OpCost(cost.bytes, cost.flops, floor, decision.measured_us))
    return found


def _shown(where: str) -> list[str]:
    """A place as the report words it; none where it is not known."""
    file, _, line = where.rpartition(":")
    return [str(Place(file, int(line)))] if file else []
