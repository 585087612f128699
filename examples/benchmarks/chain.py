"""Measure a layer up to attention: python examples/benchmarks/chain.py --only layer=SWA --out results --png

The same as `dsv4 bench chain`; `--help` lists the options. Plain PyTorch, as it is and by stock torch.compile, beside
this package's ops compiled by its backend. Without a GPU the figures are wall-clock times of this CPU, good for
comparing implementations with each other and for nothing else; a model of real size takes minutes there.
"""

from __future__ import annotations

import sys

from dsv4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "chain", *sys.argv[1:]]))
