"""Measure the linear layers that are ops: python examples/benchmarks/gemm.py --only tokens=1,64 --out results --png

The same as `dsv4 bench gemm`; `--help` lists the options. Results are compared with the reference before they are
timed. Without a GPU the figures are wall-clock times of the reference on this CPU, which says nothing about a GPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gemm", *sys.argv[1:]]))
