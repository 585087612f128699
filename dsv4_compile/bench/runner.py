"""Runs a scenario: checks each implementation against the reference, times those that agree, and keeps a record."""

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
from .problem import Args, Only, Problem, keep, status_of
from .record import Record, environment, fingerprints, now

SCENARIOS = {
    "attention": "decode and prefill: sparse_mla_decode and sparse_mla_prefill in one record",
    "attention_backends": "decode as five systems describe it: rows and lists of slots, other caches, DeepSeek-V3.2",
    "chain": "hidden states to queries and caches: plain PyTorch, stock torch.compile and the ops",
    "decode_step": "attention layers of a whole decode step, eager, compiled and as CUDA graphs, warm and cold",
    "experts": "routed experts in every weight format, with the shared expert and without",
    "gemm": "block-scaled and grouped linear layers",
    "indexer": "compressors, indexer queries, score and top-k, and the map to slots",
    "metadata": "metadata of a step in one launch, and the advance to the next step",
    "mhc": "boundaries of hyper-connections, and transformers' code for them",
    "prefill": "gathers, the indexer's selection and index rows before prefill attention",
    "preprocess": "norms, RoPE, cache insert and inverse RoPE around the projections, and the chain of all",
    "preprocess_insert": "preprocessing of a whole layer, in one launch and op by op",
    "router": "scores and choice of experts, by bias and by hash",
    "sparse_mla_decode": "attention over a window and selected entries",
    "sparse_mla_prefill": "attention of prompts over a flat workspace",
}
"""Scenarios with descriptions. Each is a module of this package of that name, or those in `PARTS`."""

PARTS = {"attention": ("sparse_mla_decode", "sparse_mla_prefill"), "preprocess": ("preprocess", "chain")}
"""Modules of a scenario that has several. A limit on a column skips those without that column."""

TUNED = ("preprocess", "indexer")
"""Scenarios that together have every op that `dsv4.impl=auto` may choose IR or a kernel for."""

FAULTS = ("wrong", "failed")
"""Statuses of rows that make a run exit with 1."""


def run(
    scenario: str,
    *,
    only: Only | None = None,
    device: torch.device | None = None,
    so_far: Callable[[Record], Any] | None = None,
    turn: Callable[[], Any] | None = None,
    modules: Sequence[Any] = (),
    command: str = "",
) -> Record:
    """Measure `scenario` and return the record; `record` describes its keys.

    Args:
        scenario: one of `SCENARIOS`, or a name for `modules`.
        only: limits columns to these values; see `problem.Only`.
        device: default: the GPU, or the CPU if there is none.
        so_far: called with the record after each problem, so that an interrupted run leaves what it has measured.
        turn: called once, after the first implementations are compiled and before one is timed; may wait for other
            processes.
        modules: scenario modules that are not part of this package, in place of those of `scenario`.
        command: the command to record; default: that of `dsv4 bench`.
    Raises:
        ValueError: with the reason `why_unsupported` gives.
    """
    only = only or {}
    if wrong := why_unsupported(scenario, only, modules):
        raise ValueError(wrong)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = ["--only " + shlex.quote(f"{column}={','.join(sorted(values))}") for column, values in only.items()]
    trusts = ["--trust"] if proven.trusting() else []
    command = command or " ".join(["dsv4 bench", scenario, *limits, f"--device {device.type}", *trusts])
    record: Record = {"scenario": scenario, **environment(device), "command": command, "copy_gb_s": None}
    record |= {"fingerprints": {}, "rows": []}
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
        problems = (module.problems(device, only) for module in modules or modules_of(scenario, only))
        for problem in itertools.chain.from_iterable(problems):
            sizes = ", ".join(f"{name} {value}" for name, value in problem.params.items())
            work.note(f"{problem.op}, {sizes}")
            lost = False
            for row in rows_of(problem, only, device, machine):
                lost = lost or (row["status"] == "failed" and _is_lost(device))
                rates = {} if lost else _rates(row, problem, machine())
                record["rows"].append(row | rates | {"date": now(), "commit": record["commit"]})
                result = row["status"] if row["us"] is None else f"{row['us']:.2f} us"
                work.advance(f"{problem.op}, {sizes}, {row['impl']}: {result}")
            record["fingerprints"] |= fingerprints((problem.op,), record["architecture"])
            if so_far is not None and record["rows"]:
                so_far(record)
            if lost:
                return record
        machine()
    return record


def choices() -> dict[str, Only]:
    """Return the scenarios that `--tune` alone measures, limited to IR and kernels of ops that have both."""
    registry.load()
    only = {"op": set(registry.LOWERINGS) & set(KERNELS), "impl": set(measured.CANDIDATES)}
    return dict.fromkeys(TUNED, only)


def why_unsupported(scenario: str, only: Only, modules: Sequence[Any] = ()) -> str:
    """Return why `run` cannot run with these arguments, or ""."""
    if not modules and scenario not in SCENARIOS:
        return f"no scenario {scenario!r}; there is {', '.join(SCENARIOS)}"
    columns = dict.fromkeys(column for module in modules or modules_of(scenario) for column in module.COLUMNS)
    unknown = [name for name in only if name not in columns]
    return f"no column {unknown[0]!r} in {scenario}; there is {', '.join(columns)}" if unknown else ""


def limits(texts: Iterable[str]) -> dict[str, set[str]]:
    """Return the `Only` that texts of the form "COLUMN=A,B" describe; values of one column add up.

    Raises:
        ValueError: a text has a different form; the message is for the user.
    """
    only: dict[str, set[str]] = {}
    for text in texts:
        column, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"--only takes COLUMN=A,B, got {text!r}")
        only.setdefault(column, set()).update(values.split(","))
    return only


def modules_of(scenario: str, only: Only = MappingProxyType({})) -> list[Any]:
    """Return the modules of one of `SCENARIOS` that have all limited columns."""
    modules = [importlib.import_module(f"{__package__}.{name}") for name in PARTS.get(scenario, (scenario,))]
    return [module for module in modules if set(only) <= set(module.COLUMNS)]


def rows_of(
    problem: Problem, only: Only, device: torch.device, begin: Callable[[], Any] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each wanted implementation of `problem`; a status other than "ok" has a note and no time.

    All are prepared and compared before the first is timed; `begin` is called before each is timed. A fault that loses
    the device, as an illegal memory access, is the last row.
    """
    if not any(keep(only, impl=name) for name in problem.implementations):
        return
    cold = timing.cold_sets(problem.cost.bytes, device) if problem.cold and problem.time_cold is None else 0
    sets = [problem.make(i) for i in range(max(1, cold))]
    prepared = []
    for row, call in _compared(problem, only):
        if row["status"] == "failed" and _is_lost(device):
            # All others would fail for the same reason, the earlier ones when they are timed.
            yield row
            return
        prepared.append((row, call))
    for row, call in prepared:
        if call is None:
            yield row
            continue
        begin()
        try:
            yield row | _timed(problem, row["impl"], call, sets, device, cold > 0)
        except Exception as fault:
            yield row | dict(zip(("status", "note"), status_of(fault), strict=True))
            if _is_lost(device):
                return


def _compared(problem: Problem, only: Only) -> Iterator[tuple[dict[str, Any], Callable[..., Any] | None]]:
    """Yield the row of each wanted implementation, and its call if its results agree with the reference's."""
    arguments = problem.make(0)
    elements = next(value.numel() for value in arguments if isinstance(value, torch.Tensor))
    want = gate.outputs(problem.reference, arguments, problem.written)
    for name, prepare in problem.implementations.items():
        if not keep(only, impl=name):
            continue
        row: dict[str, Any] = {"op": problem.op, **problem.params, "impl": name, "elements": elements}
        row |= {"published_us": dict(problem.published), "us": None}
        try:
            call = prepare()
            got = gate.outputs(call, problem.arranged(name, problem.make(0)), problem.written)
            wrong = problem.differs_of.get(name, problem.differs or gate.disagreement)(got, want)
        except Exception as fault:
            # The other implementations are still worth measuring.
            status, note = status_of(fault)
            yield row | {"status": status, "note": note}, None
            continue
        yield row | {"status": "wrong" if wrong else "ok", "note": wrong}, None if wrong else call


def _timed(
    problem: Problem, impl: str, call: Callable[..., Any], sets: Sequence[Args], device: torch.device, cold: bool
) -> dict[str, Any]:
    """Return the measurements of the implementation `impl` as columns of its row."""
    clock = "stream" if impl in problem.uncaptured else problem.clock
    sets = [problem.arranged(impl, args) for args in sets]
    result = timing.measure(call, sets, device, cold=cold and problem.clock != "stream", clock=clock)
    flushed = problem.time_cold(call, sets[0]) if problem.time_cold is not None else None
    cold_us = result.cold_us if flushed is None else flushed.us
    once = partial(call, *sets[0])
    details = problem.details(once) if problem.details is not None and device.type == "cuda" else None
    # An implementation that captures graphs holds additional memory, and its details count launches.
    memory = timing.memory(once, device) if details is None else None
    launches = None if details is not None else timing.launches(once, device)
    kernels = _kernels(once) if problem.per_kernel and device.type == "cuda" else {}
    return {
        "us": round(result.us / problem.repeats, 3),
        "cold_us": None if cold_us is None else round(cold_us / problem.repeats, 3),
        "clock": result.clock,
        "sets": len(sets),
        "launches": None if launches is None else launches // problem.repeats,
        **({} if memory is None else {"result_bytes": memory[0], "temporary_bytes": memory[1]}),
        **({} if flushed is None else {"empty_pair_us": round(flushed.empty_pair_us, 3)}),
        **({} if details is None else {"details": details}),
        **({"kernels_us": kernels} if kernels else {}),
    }


def _kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Return the warm time of each kernel of a call in microseconds, launch overhead excluded."""
    times: dict[str, float] = {}
    for node in nodes.nodes(call):
        times[node.name] = round(times.get(node.name, 0.0) + node.us, 3)
    return times


def _is_lost(device: torch.device) -> bool:
    """Return whether the device serves no further call, as after an illegal memory access."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
    except Exception:
        return True
    return False


def _rates(row: dict[str, Any], problem: Problem, machine: costs.Machine) -> dict[str, Any]:
    """Return the floor, the bandwidth (cold if measured), its share of the copy rate, and the rate of GEMMs."""
    cost = problem.cost
    known = {"bytes": cost.bytes, "flops": cost.flops, "floor_us": round(costs.floor_us(cost, machine), 3)}
    us = row.get("cold_us") or row["us"]
    if us is None:
        return known
    rate = cost.bytes / us * 1e6
    rates = known | {"gb_s": round(rate / 1e9, 1), "of_copy": round(rate / machine.copy, 3)}
    return rates | ({"tflop_s": round(cost.flops / row["us"] / 1e6, 1)} if cost.flops else {})


def _this_machine(name: str, copy: float) -> costs.Machine:
    """Return this machine: its copy rate as measured, and the rate of its GEMMs if it is known."""
    unknown = costs.Machine(name, copy, dict.fromkeys(costs.H200.flops, math.inf), 0.0)
    return replace(costs.H200, copy=copy) if costs.H200.name in name else unknown
