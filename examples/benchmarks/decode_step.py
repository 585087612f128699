"""Measure whole decode steps: python examples/benchmarks/decode_step.py --only layer=CSA --out results

The same as `dsv4 bench decode_step`; `--help` lists the options. Without a GPU the figures are wall-clock times of this
CPU, good for comparing implementations with each other and for nothing else.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "decode_step", *sys.argv[1:]]))
