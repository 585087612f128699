"""The example on graph breaks runs, prints the verdicts it describes, and leaves its pages behind."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_finding_graph_breaks.py"


def test_example_reports_breaks_then_a_recompile_then_ok(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    verdicts = re.findall(r"^.*; \d+ graph.*$", printed, re.MULTILINE)
    assert verdicts == [
        "4 graph breaks; 4 graphs",
        "1 recompile; 2 graphs",
        "ok; 1 graph, no break, no recompile",
    ]
    assert "report.save(" in printed and "aten.masked_fill" in printed
    assert "Data-dependent" in (tmp_path / "build" / "breaks.html").read_text()
    assert 'class="node"' in (tmp_path / "build" / "replay.html").read_text()
