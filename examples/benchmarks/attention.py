"""Measure attention, decode and prefill: python examples/benchmarks/attention.py --only heads=64 --out results

The same as `dsv4 bench attention`; `--help` lists the options. Results are compared with the reference before they are
timed. Without a GPU the reference alone runs, which says nothing about a GPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "attention", *sys.argv[1:]]))
