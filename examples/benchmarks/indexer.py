"""Measure the compressors and the indexer: python examples/benchmarks/indexer.py --only tokens=1,128 --out results

The same as `dsv4 bench indexer`; `--help` lists the options. Without a GPU the figures are wall-clock times of this
CPU, good for comparing implementations with each other and for nothing else.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "indexer", *sys.argv[1:]]))
