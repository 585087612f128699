"""Measure what prefill does in front of its attention: python examples/benchmarks/prefill.py --only tokens=4096

The same as `dsv4 bench prefill`; `--help` lists the options. Results are compared with the reference before they are
timed. Without a GPU the reference alone runs, which says nothing about a GPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prefill", *sys.argv[1:]]))
