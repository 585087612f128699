"""Measure the host time of eager calls with and without the launch cache: python examples/benchmarks/launch_cache.py

One line of JSON per op: microseconds per call through `torch.ops.dsv4`, the median of rounds in which all ways take
turns. "none" calls the launcher and Triton each time. The GPU runs behind the host and is waited for between rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_compile.bench import gemm, indexer, preprocess, preprocess_insert, record, sparse_mla_decode
from dsv4_compile.bench.problem import Problem, keep
from dsv4_compile.kernels.host import launch, launch_cache, replay
from dsv4_compile.ops.common import kernels
from dsv4_compile.ops.common.define import OPS

CALLS, ROUNDS = 100, 15
CASES: tuple[tuple[Any, int, dict[str, str]], ...] = (
    (gemm, 1, {"op": "fp8_linear", "layer": "wq_b", "model": "Flash"}),
    (gemm, 256, {"op": "fp8_linear", "layer": "wq_b", "model": "Flash"}),
    (gemm, 1, {"op": "fp8_linear", "layer": "wq_a + wkv beside CSA", "model": "Flash"}),
    (gemm, 256, {"op": "fp8_linear", "layer": "wq_a + wkv beside CSA", "model": "Flash"}),
    (gemm, 1, {"op": "fp8_grouped_einsum", "model": "Flash"}),
    (sparse_mla_decode, 1, {"fused": "none", "heads": "64"}),
    (sparse_mla_decode, 1, {"fused": "quant", "heads": "64"}),
    (preprocess_insert, 1, {"kind": "swa"}),
    (preprocess_insert, 1, {"kind": "csa"}),
    (indexer, 1, {"op": "indexer_topk_slots"}),
    (preprocess, 1, {"op": "fused_q_kv_rmsnorm"}),
)


def problem(scenario: Any, tokens: int, only: dict[str, str]) -> Problem:
    """Return the first problem of a scenario with these columns."""
    limits = {name: {value} for name, value in only.items()}
    problems = scenario.problems(torch.device("cuda"), limits, tokens=(tokens,))
    return next(each for each in problems if keep(limits, op=each.op, **each.params))


class Uncached:
    """A launcher without a cache."""

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self.launcher = launcher

    def find(self, args: tuple[Any, ...]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.launcher(*args, **kwargs)


class Plain(Uncached):
    """A launcher that runs each time, and whose launches use the compiled kernels of an earlier call like it."""

    def __init__(self, launcher: Callable[..., Any]) -> None:
        super().__init__(launcher)
        self.entries: dict[Any, list[Any]] = {}
        self.noted: list[Any] = []

    def find(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        entries = self.entries.get(launch_cache.key_of(args))
        return None if entries is None else lambda args: self.again(iter(entries), args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.noted = []
        launch.noting.tape = self
        result = self.launcher(*args)
        launch.noting.tape = None
        self.entries[launch_cache.key_of(args)] = self.noted
        # Launchers import modules of kernels when they first need them.
        LAUNCHERS[:] = [module for name, module in sys.modules.items() if name.startswith("dsv4_compile.kernels.")]
        return result

    def launched(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        self.noted.append((compiled[(*grid, 1, 1)[:3]], values))

    def made_each_time(self, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return make(*args)

    def again(self, entries: Iterator[Any], args: tuple[Any, ...]) -> Any:
        """Run the launcher with launches replaced by the next compiled kernel."""

        def launch_next(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
            run, values = next(entries)
            run(*args, *values[len(args) :])

        def launch_next_clusters(kernel: Any, ctas: int, cluster: int, fetched: int, *args: Any, **constants: Any):
            launch_next(kernel, None, *args)

        start = time.perf_counter()
        replaced = [
            (module, name, getattr(module, name), new)
            for name, new in (("launch_kernel", launch_next), ("launch_clusters", launch_next_clusters))
            for module in LAUNCHERS
            if hasattr(module, name)
        ]
        for module, name, _, new in replaced:
            setattr(module, name, new)
        self.seconds = time.perf_counter() - start
        result = self.launcher(*args)
        start = time.perf_counter()
        for module, name, old, _ in replaced:
            setattr(module, name, old)
        self.seconds += time.perf_counter() - start
        return result


LAUNCHERS: list[Any] = []
WAYS: dict[str, Callable[..., Any]] = {
    "tape": launch_cache.Planned,
    "replay": replay.LaunchCache,
    "plain": Plain,
    "none": Uncached,
}


def seconds(op: Callable[..., Any], args: tuple[Any, ...], work: Any) -> float:
    """Return the host time of a call that goes through `work`."""
    kernels.planned = lambda op: work
    op(*args)
    torch.cuda.synchronize()
    replacing, start = 0.0, time.perf_counter()
    for _ in range(CALLS):
        op(*args)
        # Replacing functions of modules is no part of a plain cache.
        replacing += getattr(work, "seconds", 0.0)
    total = time.perf_counter() - start
    torch.cuda.synchronize()
    return (total - replacing) / CALLS


def rows() -> Iterator[dict[str, Any]]:
    for scenario, tokens, only in CASES:
        case = problem(scenario, tokens, only)
        args = case.make(0)
        works = {name: way(kernels.launcher(case.op)) for name, way in WAYS.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        faults: dict[str, str] = {}
        for _ in range(ROUNDS):
            for name, work in works.items():
                try:
                    times[name].append(seconds(OPS[case.op], args, work))
                except Exception as fault:
                    times[name].append(float("nan"))
                    faults[name] = repr(fault)
        found = {f"{name}_us": round(statistics.median(each[2:]) * 1e6, 1) for name, each in times.items()}
        yield {"op": case.op, **case.params, **found, "unsupported": [*works["replay"].unsupported.values()], **faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels run on GPUs")
    kernels.runs_kernel = lambda op, device: True  # proven or not
    print(json.dumps(record.environment(torch.device("cuda"))), flush=True)
    with torch.no_grad():
        for row in rows():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
