"""Time the modules around attention: python examples/benchmarks/around_attention.py --out examples/results

Experts, routers and hyper-connections of V4-Flash with their peers, one record for each scenario of `dsv4 bench`, in
less than four minutes on a GPU: no problem is begun after --seconds. What is missing then is named, and the exit status
is 1, as it is for a wrong or failed implementation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dsv4_compile import bench
from dsv4_compile.bench import expert_peers, experts, mhc, router
from dsv4_compile.bench.problem import Only
from dsv4_compile.bench.record import write_json

ROUTED = {"triton", *expert_peers.OF_TRANSFORMERS, expert_peers.TORCH, expert_peers.MARLIN}
FLASH: Mapping[str, set[str]] = {"model": {"Flash"}, "tokens": {"1", "8", "32", "128", "512", "2048", "16384"}}
PARTS: Sequence[tuple[str, Any, Mapping[str, set[str]], float]] = (
    ("experts", experts, {**FLASH, "shared": {"none"}, "impl": ROUTED}, 0.7),
    ("router", router, {**FLASH, "impl": {"triton", router.TRANSFORMERS}}, 0.85),
    ("mhc", mhc, {**FLASH, "impl": {"triton", mhc.TRANSFORMERS}}, 1.0),
)
"""Scenarios, their modules, what is measured of each, and the share of the time after which no problem is begun."""
FORMATS = ("bfloat16", "mxfp4", "interleaved", "e4m3")
"""Formats of weights in the order of measurement: those that peers have come first."""


class InTime:
    """A scenario that begins no problem after `deadline`; `missed` are the sizes of the others."""

    def __init__(self, module: Any, deadline: float) -> None:
        self.module, self.deadline = module, deadline
        self.COLUMNS = module.COLUMNS
        self.missed: list[str] = []

    def problems(self, device: torch.device, only: Only) -> Iterator[bench.Problem]:
        """Yield the problems of the scenario that can be begun in time."""
        problems = self.module.problems(device, only)
        for problem in sorted(problems, key=lambda each: FORMATS.index(each.params.get("weights", FORMATS[0]))):
            if time.perf_counter() < self.deadline:
                yield problem
            else:
                self.missed.append(f"{problem.op} {', '.join(map(str, problem.params.values()))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description="Experts, routers and hyper-connections of V4-Flash and their peers.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no problem later (%(default)s)")
    parser.add_argument("--out", metavar="FOLDER", help="write experts.json, router.json and mhc.json there")
    args = parser.parse_args(argv)
    status = 0
    for scenario, module, only, share in PARTS:
        timed = InTime(module, begin + share * args.seconds)
        command = f"python examples/benchmarks/around_attention.py --device {args.device}"
        record = bench.run(scenario, only=only, device=torch.device(args.device), modules=[timed], command=command)
        print(bench.render(record), flush=True)
        if timed.missed:
            print(f"no time for {'; '.join(timed.missed)}", file=sys.stderr)
        status |= bool(timed.missed) or any(row["status"] in bench.FAULTS for row in record["rows"])
        if args.out and record["rows"]:
            write_json(record, args.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
