"""Merge records of several runs into one: python examples/benchmarks/merge.py parts/*/decode_step.json --out results

A long scenario is measured in parts, with `--only` and a separate `--out`. Rows come in the order of the files,
each with the date and commit of its run; a row of a later file replaces an earlier one of the same op, sizes and
implementation. Records of compile times and soak runs can be merged too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_compile import bench
from dsv4_compile._files import replace
from dsv4_compile.selection import measured


def _record(path: Path) -> dict[str, Any]:
    """Return the record in a file; ValueError if the file holds something else."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(contents, dict) or "rows" not in contents:
        raise ValueError("it has no rows")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    """Write NAME.json, and for a scenario of `dsv4 bench` NAME.txt and, with --png, NAME.png."""
    parser = argparse.ArgumentParser(description="Merge records of one scenario, machine and set of versions.")
    parser.add_argument("parts", nargs="+", type=Path, metavar="RECORD.json")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: this folder")
    parser.add_argument("--name", help="of the files; default: that of the scenario")
    parser.add_argument("--png", action="store_true", help="draw the times, with matplotlib")
    parser.add_argument("--tune", action="store_true", help="tune from the merged record, like dsv4 bench --tune")
    args = parser.parse_args(argv)
    parts = []
    for source in args.parts:
        try:
            parts.append(_record(source))
        except (OSError, ValueError) as fault:
            parser.error(f"{source} is no record: {fault}")
    merged = bench.merge(parts)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name or merged['scenario']}.json"
    replace(path, json.dumps(merged, indent=1))
    if merged["scenario"] in bench.SCENARIOS:
        replace(path.with_suffix(".txt"), bench.render(merged))
        if args.png:
            bench.draw(merged, args.out, path.stem)
    print(f"{len(merged['rows'])} rows written to {path}")
    if args.tune:
        print(f"{measured.update(merged)} sizes of both ir and triton written to {measured.RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
