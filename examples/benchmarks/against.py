"""Compare kernels of this checkout with those of others: python examples/benchmarks/against.py OTHER/kernels gemm

Times of one kernel differ by a tenth between processes, more than most changes gain. Here the `kernels` folders of
other checkouts (`NAME=FOLDER` names one) are packages in one process, and CUDA graphs of all are replayed in turn,
round by round. A row has the median of each scenario's `triton` implementation, and for others the share of rounds in
which they were faster than ours. Others run with our layouts and references; `other_bytes` names those whose results
differ. `--compile` only compiles, so that several processes can fill the cache before one measures.
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
    found = {OURS: f"{dsv4_compile.__name__}.kernels"}
    for index, other in enumerate(others):
        name, _, folder = other.rpartition("=")
        found[name or f"other{index or ''}"] = package(name or f"other{index or ''}", Path(folder).resolve())
    return found


def module(of: str, stem: str) -> ModuleType:
    return importlib.import_module(f"{of}.{stem}")


def launchers(op: str, of: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """Return the launchers of `op` by name, as functions of the op's arguments."""
    found = {name: getattr(module(each, KERNELS[op]), op) for name, each in of.items()}
    # A launcher of a wide op takes its arguments as one tuple, in an older checkout one by one.
    wide = {name: len(inspect.getfullargspec(call).args) > 1 for name, call in found.items()}
    return {name: call if wide[name] else packed(op, call) for name, call in found.items()}


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
    first, *rest = (each[3:] for each in times.values())
    found: dict[str, Any] = {f"{next(iter(calls))}_us": round(statistics.median(first), 3)}
    for name, each in zip(list(calls)[1:], rest, strict=True):
        faster = sum(x < y for x, y in zip(each, first, strict=True)) / rounds
        found |= {f"{name}_us": round(statistics.median(each), 3), f"{name}_faster": round(faster, 2)}
    return found


def same(a: Any, b: Any) -> bool:
    """Return whether two results have the same bytes."""
    leaves = [[x for x in pytree.tree_leaves(each) if isinstance(x, Tensor)] for each in (a, b)]
    bytes_of = [[x.contiguous().view(torch.uint8) for x in each] for each in leaves]
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
            found = in_turn({name: partial(results_of, call, sets) for name, call in calls.items()}, options.rounds)
            found = {name: round(x / len(sets), 3) if name.endswith("_us") else x for name, x in found.items()}
            yield {"op": problem.op, **problem.params, "sets": len(sets), **found, "other_bytes": other}


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
    kept = {"scenario": "against", **environment, "fingerprints": {}, "rows": []}
    kept["command"] = " ".join(["python examples/benchmarks/against.py", *sys.argv[1:]])
    with torch.no_grad():
        for row in record.collect(kept, rows(options), options.out):
            kept["fingerprints"] |= record.fingerprints((row["op"],), environment["architecture"])
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
