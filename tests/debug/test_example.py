"""The example on graph breaks runs and prints the verdicts it describes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_finding_graph_breaks.py"


def test_example_reports_breaks_then_a_recompile_then_ok(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    verdicts = re.findall(r"^.*; \d+ graph.*$", capsys.readouterr().out, re.MULTILINE)
    assert verdicts == [
        "4 graph breaks; 4 graphs",
        "1 recompile; 2 graphs",
        "ok; 1 graph, no break, no recompile",
    ]
