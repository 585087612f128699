"""Run a scenario: check each implementation against the reference, time those that agree, and keep a record."""

from __future__ import annotations

import importlib
import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from .. import progress
from ..lowering import registry
from ..ops.common.kernels import KERNELS
from ..selection import costs, measured, proven
from . import gate, nodes, timing
from .problem import Args, Only, Problem, keep
from .record import Record, environment

SCENARIOS = {
    "attention": "decode and prefill: sparse_mla_decode and sparse_mla_prefill in one record",
    "attention_backends": "decodes as five systems describe them: rows and lists of slots, other caches, DeepSeek-V3.2",
    "chain": "hidden states to queries and caches: plain PyTorch, stock torch.compile and the ops",
    "decode_step": "attention of a whole decode step, as a user runs it, in graphs and without",
    "gemm": "block-scaled and grouped linear layers",
    "gemm_tiles": "the kernels of gemm with every cut they could choose",
    "indexer": "compressors, indexer queries, score and top-k, and the map to slots",
    "indexer_tiles": "the kernels of indexer with every tile they could choose",
    "metadata": "a step's metadata in one launch, and the move to the next step",
    "prefill": "gathers, the indexer's selection and index rows in front of prefill attention",
    "preprocess": "norms, RoPE, cache insert and inverse RoPE around the projections, and the chain of all",
    "preprocess_insert": "the preprocessing of a whole layer, in one launch and op by op",
    "preprocess_insert_tiles": "the kernel of preprocess_insert with other cuts than it chooses",
    "preprocess_tiles": "the kernels of preprocess with every tile they could choose",
    "sparse_mla_decode": "attention over a window and selected entries",
    "sparse_mla_decode_tiles": "the kernels of sparse_mla_decode with every cut they could choose",
    "sparse_mla_prefill": "attention of prompts over a flat workspace",
}
"""Name of a scenario and what it measures: modules of this package, one of that name or its `PARTS`."""

PARTS = {"attention": ("sparse_mla_decode", "sparse_mla_prefill"), "preprocess": ("preprocess", "chain")}
"""The modules of a scenario that has several. A limit of a column leaves out those that lack it."""

TUNED = ("preprocess", "indexer")
"""Scenarios that have every op between whose IR and kernel `dsv4.impl=auto` may choose."""


def run(
    scenario: str,
    *,
    only: Only | None = None,
    device: torch.device | None = None,
    so_far: Callable[[Record], Any] | None = None,
    turn: Callable[[], Any] | None = None,
) -> Record:
    """Measure `scenario` and return the record; see the package for the keys of a row.

    Args:
        scenario: one of `SCENARIOS`.
        only: limits columns to these values; see `problem.Only`.
        device: default: the GPU, or the CPU where there is none.
        so_far: called with the record after each problem, so that a run that is cut short has left something.
        turn: called once, when the first implementation is compiled and about to be timed: may wait until it is alone.
    Raises:
        ValueError: `complaint` has something to say.
    """
    only = only or {}
    if wrong := complaint(scenario, only):
        raise ValueError(wrong)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = ["--only " + shlex.quote(f"{column}={','.join(sorted(values))}") for column, values in only.items()]
    trusts = ["--trust"] if proven.trusting() else []
    command = " ".join(["dsv4 bench", scenario, *limits, f"--device {device.type}", *trusts])
    record: Record = {"scenario": scenario, **environment(device), "command": command, "copy_gb_s": None}
    modules = modules_of(scenario, only)
    machines: list[costs.Machine] = []

    def machine() -> costs.Machine:
        if not machines:
            if turn is not None:
                turn()
            ceiling = timing.copy_rate(device)
            record["copy_gb_s"] = round(ceiling / 1e9, 1)
            machines.append(_this_machine(record["machine"], ceiling))
        return machines[0]

    with torch.no_grad(), progress.stage(f"bench {scenario}") as work:
        record["rows"] = []
        for problem in itertools.chain.from_iterable(module.problems(device, only) for module in modules):
            sizes = ", ".join(f"{name} {value}" for name, value in problem.params.items())
            work.note(f"{problem.op}, {sizes}")
            for row in rows_of(problem, only, device, machine):
                record["rows"].append(row | _rates(row, problem, machine()))
                found = row["status"] if row["us"] is None else f"{row['us']:.2f} us"
                work.advance(f"{problem.op}, {sizes}, {row['impl']}: {found}")
            if so_far is not None and record["rows"]:
                so_far(record)
        machine()
    return record


def choices() -> dict[str, Only]:
    """What `--tune` alone measures: by scenario the limits that leave its ops with both IR and a kernel, and these."""
    registry.load()
    only = {"op": set(registry.LOWERINGS) & set(KERNELS), "impl": set(measured.CANDIDATES)}
    return dict.fromkeys(TUNED, only)


def complaint(scenario: str, only: Only) -> str:
    """What is wrong with these arguments of `run`, or ""."""
    if scenario not in SCENARIOS:
        return f"no scenario {scenario!r}; there is {', '.join(SCENARIOS)}"
    columns = dict.fromkeys(column for module in modules_of(scenario) for column in module.COLUMNS)
    unknown = [name for name in only if name not in columns]
    return f"no column {unknown[0]!r} in {scenario}; there is {', '.join(columns)}" if unknown else ""


def limits(texts: Iterable[str]) -> dict[str, set[str]]:
    """An `Only` of "COLUMN=A,B"; limits of one column add up.

    Raises:
        ValueError: one is no such text, with what to say of it.
    """
    only: dict[str, set[str]] = {}
    for text in texts:
        column, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"--only takes COLUMN=A,B, got {text!r}")
        only.setdefault(column, set()).update(values.split(","))
    return only


def modules_of(scenario: str, only: Only = MappingProxyType({})) -> list[Any]:
    """The modules of one of `SCENARIOS`, but those that lack a limited column."""
    found = [importlib.import_module(f"{__package__}.{name}") for name in PARTS.get(scenario, (scenario,))]
    return [module for module in found if set(only) <= set(module.COLUMNS)]


def rows_of(
    problem: Problem, only: Only, device: torch.device, begin: Callable[[], Any] = lambda: None
) -> Iterator[dict[str, Any]]:
    """One row for each wanted implementation of `problem`. One that is wrong or missing has a note and no time.

    All are prepared and compared before the first is timed; `begin` is called before each is.
    """
    if not any(keep(only, impl=name) for name in problem.implementations):
        return
    cold = timing.cold_sets(problem.cost.bytes, device) if problem.cold else 0
    sets = [problem.make(i) for i in range(max(1, cold))]
    for row, call in list(_compared(problem, only)):
        if call is None:
            yield row
        else:
            begin()
            yield row | _timed(problem, call, sets, device, cold > 0)


def _compared(problem: Problem, only: Only) -> Iterator[tuple[dict[str, Any], Callable[..., Any] | None]]:
    """The row of each wanted implementation, and its call where that gives what the reference gives."""
    made = problem.make(0)
    elements = next(value.numel() for value in made if isinstance(value, torch.Tensor))
    want = gate.outputs(problem.reference, made, problem.written)
    for name, prepare in problem.implementations.items():
        if not keep(only, impl=name):
            continue
        row: dict[str, Any] = {"op": problem.op, **problem.params, "impl": name, "elements": elements}
        row |= {"published_us": dict(problem.published), "us": None}
        try:
            call = prepare()
            wrong = (problem.differs or gate.disagreement)(gate.outputs(call, problem.make(0), problem.written), want)
        except Exception as fault:
            # Whatever keeps one implementation from running, the others are still worth measuring.
            yield row | {"status": "unavailable", "note": _summary(fault)}, None
            continue
        yield row | {"status": "wrong" if wrong else "ok", "note": wrong}, None if wrong else call


def _timed(
    problem: Problem, call: Callable[..., Any], sets: Sequence[Args], device: torch.device, cold: bool
) -> dict[str, Any]:
    """What was measured of one implementation, as columns of its row."""
    result = timing.measure(call, sets, device, cold=cold, clock=problem.clock)
    beside = 0.0
    if problem.beside is not None:
        beside = timing.measure(problem.beside, [()], device, clock=problem.clock).us
        result = replace(result, us=result.us - beside)
    once = partial(call, *sets[0])
    details = problem.details(once) if problem.details is not None and device.type == "cuda" else None
    # What captures itself holds memory of its own, and says so in its details.
    memory = timing.memory(once, device) if details is None else None
    launches = None if details is not None else timing.launches(once, device)
    kernels = _kernels(once) if problem.split and device.type == "cuda" else {}
    return {
        "us": round(result.us / problem.alike, 3),
        "cold_us": None if result.cold_us is None else round(result.cold_us / problem.alike, 3),
        "clock": result.clock,
        "sets": len(sets),
        "launches": None if launches is None else launches // problem.alike,
        **({} if memory is None else {"result_bytes": memory[0], "temporary_bytes": memory[1]}),
        **({"beside_us": round(beside / problem.alike, 3)} if problem.beside is not None else {}),
        **({} if details is None else {"details": details}),
        **({"kernels_us": kernels} if kernels else {}),
    }


def _kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a call whose arguments are in the cache; without what a launch takes."""
    found: dict[str, float] = {}
    for node in nodes.nodes(call):
        found[node.name] = round(found.get(node.name, 0.0) + node.us, 3)
    return found


def _rates(row: dict[str, Any], problem: Problem, machine: costs.Machine) -> dict[str, Any]:
    """The floor; achieved bandwidth, cold where that was measured, its share of the copy rate; rate of the products."""
    cost = problem.cost
    known = {"bytes": cost.bytes, "flops": cost.flops, "floor_us": round(costs.floor_us(cost, machine), 3)}
    us = row.get("cold_us") or row["us"]
    if us is None:
        return known
    rate = cost.bytes / us * 1e6
    rates = known | {"gb_s": round(rate / 1e9, 1), "of_copy": round(rate / machine.copy, 3)}
    return rates | ({"tflop_s": round(cost.flops / row["us"] / 1e6, 1)} if cost.flops else {})


def _this_machine(name: str, copy: float) -> costs.Machine:
    """This machine: its copy rate as measured here, and the rate of its products where that is known."""
    unknown = costs.Machine(name, copy, dict.fromkeys(costs.H200.flops, math.inf), 0.0)
    return replace(costs.H200, copy=copy) if costs.H200.name in name else unknown


def _summary(fault: Exception) -> str:
    """The line of a message that says most: of one of our errors the reason, else the first."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [type(fault).__name__]
    return next((line.removeprefix("why").strip() for line in lines if line.startswith("why ")), lines[0])
