"""Tests of the benchmark of compile times."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "benchmarks" / "compile_time.py"


def test_compile_times_are_of_a_prompt_and_of_steps() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compiler.reset()
    row = runpy.run_path(str(EXAMPLE))["measure"](2, torch.device("cpu"), {}, 40, backend)
    assert len(graphs) == 2
    assert row["compile_s"] > row["prompt_s"] > 0 < row["steps_s"]
    assert row["host_mib"] > 100
