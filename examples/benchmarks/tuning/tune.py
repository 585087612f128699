"""Compare the tilings of the kernels of a scenario: python examples/benchmarks/tuning/tune.py gemm --only tokens=8

The problems are those of `dsv4 bench SCENARIO`, each with one implementation for every tiling that a launcher could
choose; the best ones go into the launchers by hand.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from dsv4_compile import bench
from dsv4_compile.selection import proven

SCENARIOS = ("gemm", "indexer", "preprocess", "preprocess_insert", "sparse_mla_decode")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, as of `dsv4 bench`."""
    parser = argparse.ArgumentParser(description="Compare the tilings of the kernels of a scenario.")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--only", action="append", default=[], metavar="COLUMN=A,B", help="limit a column of the table")
    parser.add_argument("--out", metavar="FOLDER", help="write the record there")
    args = parser.parse_args(argv)
    name = f"{args.scenario}_tiles"
    module = importlib.import_module(name)
    try:
        only = bench.limits(args.only)
    except ValueError as fault:
        parser.error(str(fault))
    if wrong := bench.why_unsupported(name, only, [module]):
        parser.error(wrong)
    command = " ".join(["python examples/benchmarks/tuning/tune.py", *(sys.argv[1:] if argv is None else argv)])
    so_far = partial(bench.write, folder=args.out) if args.out else None
    with proven.trust():
        record = bench.run(name, only=only, so_far=so_far, modules=[module], command=command)
    print(bench.render(record))
    if args.out and record["rows"]:
        bench.save(record, args.out)
    return int(any(row["status"] in bench.FAULTS for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
