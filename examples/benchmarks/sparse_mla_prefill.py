"""Measure prefill attention: python examples/benchmarks/sparse_mla_prefill.py --only heads=64 --out results

The same as `dsv4 bench sparse_mla_prefill`; `--help` lists the options. Results are compared with the reference before
they are timed. Without a GPU the reference alone runs, which says nothing about a GPU.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "sparse_mla_prefill", *sys.argv[1:]]))
