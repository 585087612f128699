"""Measure a layer's preprocessing: python examples/benchmarks/preprocess_insert.py --only kind=csa --out results

The same as `dsv4 bench preprocess_insert`; `--help` lists the options. In one launch, and op by op with a kernel each.
Without a GPU the PyTorch reference is timed, by the clock on the wall of this CPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "preprocess_insert", *sys.argv[1:]]))
