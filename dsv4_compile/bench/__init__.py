"""Benchmarks of this package's ops, behind `dsv4 bench`.

    record = dsv4_compile.bench.run("preprocess", only={"tokens": {"8"}, "impl": {"ir", "triton"}})
    print(dsv4_compile.bench.render(record))

A scenario is a module of this package, or several, with `COLUMNS`, what `only` may name, and `problems(device, only)`,
an iterator of `Problem`. Each implementation of a problem must first agree with the reference; only then is it timed. A
new scenario is a line in `SCENARIOS`.
"""

from __future__ import annotations

from .pictures import can_draw, draw, require_drawing
from .problem import Problem, keep
from .record import merge, save, write
from .runner import SCENARIOS, choices, complaint, limits, run
from .table import render

__all__ = [
    "SCENARIOS",
    "Problem",
    "can_draw",
    "choices",
    "complaint",
    "draw",
    "keep",
    "limits",
    "merge",
    "render",
    "require_drawing",
    "run",
    "save",
    "write",
]
