"""Benchmarks of this package's ops, run by `dsv4 bench`.

    record = dsv4_compile.bench.run("preprocess", only={"tokens": {"8"}, "impl": {"ir", "triton"}})
    print(dsv4_compile.bench.render(record))

A scenario is one or more modules of this package with `COLUMNS`, which `only` may name, and `problems(device, only)`,
an iterator of `Problem`. An implementation is timed only if it agrees with the reference. A new scenario is an entry
of `SCENARIOS`.
"""

from __future__ import annotations

from .pictures import can_draw, draw, require_drawing
from .problem import Problem, keep
from .record import merge, save, write
from .runner import FAULTS, SCENARIOS, choices, limits, run, why_unsupported
from .table import render

__all__ = [
    "FAULTS",
    "SCENARIOS",
    "Problem",
    "can_draw",
    "choices",
    "draw",
    "keep",
    "limits",
    "merge",
    "render",
    "require_drawing",
    "run",
    "save",
    "why_unsupported",
    "write",
]
