"""Compare kernels of this checkout with those of others: python examples/benchmarks/against.py OTHER/kernels gemm

Times of one kernel differ by a tenth between processes, more than most changes gain. Here the `kernels` folders of
other checkouts (`NAME=FOLDER` names one) are packages in one process, and CUDA graphs of all are replayed in turn,
round by round. A row has the median of each scenario's `triton` implementation, and for others the share of rounds
where they were faster than ours. Others run with our layouts and references; `other_bytes` names those with different
results. `--compile` only compiles, so that several processes can fill the cache before one measures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import dsv4_compile
from dsv4_compile.bench import keep, limits, record, runner
from dsv4_compile.bench.timing import calls_of_a_graph, replay_us
from dsv4_compile.ops.common.arguments import packed
from dsv4_compile.ops.common.kernels import KERNELS

OURS = "ours"
ROUNDS = 41


def package(name: str, folder: Path) -> str:
    """Make a `kernels` folder a package inside ours, and return its name."""
    full = f"{dsv4_compile.__name__}.kernels_{name}"
    spec = ModuleSpec(full, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[full] = importlib.util.module_from_spec(spec)
    return full


def packages(others: Sequence[str]) -> dict[str, str]:
    """Return the packages of kernels by name, ours first."""
    names = {OURS: f"{dsv4_compile.__name__}.kernels"}
    for index, other in enumerate(others):
        name, _, folder = other.rpartition("=")
        names[name or f"other{index or ''}"] = package(name or f"other{index or ''}", Path(folder).resolve())
    return names


def module(of: str, stem: str) -> ModuleType:
    return importlib.import_module(f"{of}.{stem}")


def launchers(op: str, of: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """Return the launchers of `op` by name, as functions of the op's arguments."""
    calls = {name: getattr(module(package, KERNELS[op].partition("kernels.")[2]), op) for name, package in of.items()}
    # A launcher of a wide op takes its arguments as one tuple, in an older checkout one by one.
    wide = {name: len(inspect.getfullargspec(call).args) > 1 for name, call in calls.items()}
    return {name: call if wide[name] else packed(op, call) for name, call in calls.items()}


def graph_of(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the median of each call in microseconds, and how often the others were faster than the first."""
    once = {name: graph_of(call, 1) for name, call in calls.items()}
    for graph in once.values():
        graph.replay()
    longest = max(min(replay_us(graph) for _ in range(5)) for graph in once.values())
    repeats = calls_of_a_graph(longest)
    graphs = {name: graph_of(call, repeats) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name in list(graphs) if turn % 2 else reversed(graphs):
            times[name].append(replay_us(graphs[name]) / repeats)
    first, *rest = (us[3:] for us in times.values())
    row: dict[str, Any] = {f"{next(iter(calls))}_us": round(statistics.median(first), 3)}
    for name, us in zip(list(calls)[1:], rest, strict=True):
        faster = sum(x < y for x, y in zip(us, first, strict=True)) / rounds
        row |= {f"{name}_us": round(statistics.median(us), 3), f"{name}_faster": round(faster, 2)}
    return row


def same(a: Any, b: Any) -> bool:
    """Return whether two results have the same bytes."""
    leaves = [[x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)] for result in (a, b)]
    bytes_of = [[x.contiguous().view(torch.uint8) for x in tensors] for tensors in leaves]
    return all(torch.equal(x, y) for x, y in zip(*bytes_of, strict=True))


def results_of(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the results of consecutive calls; holding them all keeps memory from being reused."""
    return [call(*args) for args in sets]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, of, only = torch.device("cuda"), packages(options.others), limits(options.only)
    for scenario in runner.modules_of(options.scenario, only):
        for problem in scenario.problems(device, only, **({"tokens": options.tokens} if options.tokens else {})):
            if problem.op not in KERNELS or not keep(only, op=problem.op, **problem.params):
                continue
            calls, sets = launchers(problem.op, of), [problem.make(seed) for seed in range(options.sets)]
            results = {name: call(*problem.make(0)) for name, call in calls.items()}
            if options.compile:
                continue
            other = [name for name, result in results.items() if not same(result, results[OURS])]
            times = in_turn({name: partial(results_of, call, sets) for name, call in calls.items()}, options.rounds)
            times = {name: round(x / len(sets), 3) if name.endswith("_us") else x for name, x in times.items()}
            yield {"op": problem.op, **problem.params, "sets": len(sets), **times, "other_bytes": other}


def why_unsupported(options: argparse.Namespace) -> str:
    """Return why the script cannot run with these options, or ""."""
    try:
        only = limits(options.only)
    except ValueError as fault:
        return str(fault)
    fixed = [m for m in runner.modules_of(options.scenario) if "tokens" not in inspect.signature(m.problems).parameters]
    if options.tokens and fixed:
        return f"--tokens: {options.scenario} has sizes of its own; --only tokens= chooses among them"
    if min(options.rounds, options.sets) < 1:
        return "--rounds and --sets are at least 1"
    return runner.why_unsupported(options.scenario, only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", metavar="[NAME=]KERNELS", help="the kernels folder of another checkout")
    parser.add_argument("scenario", choices=runner.SCENARIOS)
    parser.add_argument("--only", action="append", default=[], metavar="COLUMN=A,B", help="limit a column")
    parser.add_argument("--tokens", type=int, nargs="+", help="replace the scenario's sizes")
    parser.add_argument("--sets", type=int, default=1, help="argument sets that take turns")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args()
    if wrong := why_unsupported(options):
        parser.error(wrong)
    if not torch.cuda.is_available():
        parser.error("kernels run on GPUs")
    environment = record.environment(torch.device("cuda"))
    contents = {"scenario": "against", **environment, "fingerprints": {}, "rows": []}
    contents["command"] = " ".join(["python examples/benchmarks/against.py", *sys.argv[1:]])
    with torch.no_grad():
        for row in record.collect(contents, rows(options), options.out):
            contents["fingerprints"] |= record.fingerprints((row["op"],), environment["architecture"])
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
