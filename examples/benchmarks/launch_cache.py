"""Measure the host time of eager calls with and without the launch cache: python examples/benchmarks/launch_cache.py

One line of JSON per op: microseconds per call through `torch.ops.dsv4`, the median of rounds with both in turn.
Without the cache, launcher and Triton run each time. The GPU runs after the host; the host waits for it between rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_compile.bench import gemm, indexer, preprocess, preprocess_insert, record, sparse_mla_decode
from dsv4_compile.bench.problem import Problem, keep
from dsv4_compile.kernels.host.launch_cache import Found, LaunchCache
from dsv4_compile.ops.common import kernels
from dsv4_compile.ops.common.define import OPS

CALLS, ROUNDS, WARM_UP = 100, 15, 2
CASES: tuple[tuple[Any, int, dict[str, str]], ...] = (
    (gemm, 1, {"op": "fp8_linear", "layer": "wq_b", "model": "Flash"}),
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
"""Scenario, tokens and limits of its columns; the first problem is measured."""


def problem(scenario: Any, tokens: int, only: dict[str, str]) -> Problem:
    """Return the first problem of a scenario with these columns."""
    limits = {name: {value} for name, value in only.items()}
    problems = scenario.problems(torch.device("cuda"), limits, tokens=(tokens,))
    return next(candidate for candidate in problems if keep(limits, op=candidate.op, **candidate.params))


class Uncached(LaunchCache):
    """A launch cache that keeps nothing."""

    def look_up(self, args: tuple[Any, ...]) -> Found:
        return Found((), "nothing is cached")


def seconds(op: Callable[..., Any], args: tuple[Any, ...], cache: LaunchCache) -> float:
    """Return the host time of a call that goes through `cache`."""
    kernels.launch_cache = lambda op: cache
    op(*args)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        op(*args)
    total = time.perf_counter() - start
    torch.cuda.synchronize()
    return total / CALLS


def rows() -> Iterator[dict[str, Any]]:
    for scenario, tokens, only in CASES:
        case = problem(scenario, tokens, only)
        args, launcher = case.make(0), kernels.launcher(case.op)
        caches = {"cached": LaunchCache(launcher), "uncached": Uncached(launcher)}
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _ in range(WARM_UP + ROUNDS):
            for name, cache in caches.items():
                times[name].append(seconds(OPS[case.op], args, cache))
        columns = {f"{name}_us": round(statistics.median(us[WARM_UP:]) * 1e6, 1) for name, us in times.items()}
        yield {"op": case.op, **case.params, **columns, "unsupported": [*caches["cached"].unsupported.values()]}


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
