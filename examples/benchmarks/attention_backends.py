"""Measure decode of five systems: python examples/benchmarks/attention_backends.py --only tokens=1,128 --out results

The same as `dsv4 bench attention_backends`; `--help` lists the options. Results are compared with the reference before
they are timed. Without a GPU the figures are wall-clock times of the reference, which say nothing about a GPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "attention_backends", *sys.argv[1:]]))
