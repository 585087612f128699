"""`dsv4 explain script.py`: the script runs, its compilations are reported, and the exit status tells the outcome."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug import Report, explain_script

SCRIPT = """
import sys
import torch

@torch.compile(backend="eager", fullgraph=True)
def with_break(x):
    y = x * 2
    print("from the script")
    return y + 1

@torch.compile(backend="aot_eager")
def without(x):
    return x.sin()

class Module(torch.nn.Module):
    def forward(self, x):
        return x.cos()

if __name__ == "__main__":
    with_break(torch.ones(2))
    without(torch.ones(2))
    module = Module()
    module.compile(backend="eager")
    module(torch.ones(2))
    assert sys.argv == [__file__]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(SCRIPT)
    return path


def test_every_compile_of_a_script_is_observed(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, argv = torch.compile, list(sys.argv)
    assert explain_script(script) == 0
    out = capsys.readouterr().out
    assert "from the script" in out
    assert "1 graph break; 4 graphs" in out
    assert "model.py:8" in out
    assert "backend eager, aot_eager" in out
    assert torch.compile is before
    assert sys.argv == argv


def test_json_output_is_only_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_script(script, json=True) == 0
    captured = capsys.readouterr()
    report = Report.from_json(captured.out)
    assert [item.place.line for item in report.breaks] == [8]
    assert "from the script" in captured.err
    assert json.loads(captured.out)["ok"] is False


def test_report_is_written_as_a_page_too(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = script.with_suffix(".html")
    assert explain_script(script, html=page) == 0
    assert "1 graph break; 4 graphs" in page.read_text()
    assert 'href="https://' in page.read_text()
    assert "report.save('report.html')" in capsys.readouterr().out


@pytest.mark.parametrize(("accepted", "status"), [(0, 1), (1, 0), (None, 0)])
def test_status_follows_the_number_of_breaks(script: Path, accepted: int | None, status: int) -> None:
    assert explain_script(script, max_breaks=accepted) == status


def test_script_that_raises_is_reported_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\ntorch.compile(torch.sin, backend='eager')(torch.ones(2))\nraise KeyError('page')\n")
    assert explain_script(path, max_breaks=0) == 2
    out = capsys.readouterr().out
    assert "broken.py:3" in out
    assert "KeyError" in out
    assert "1 graph" in out


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("", 0), ("3", 2)])
def test_script_that_exits_is_judged_by_its_exit_status(tmp_path: Path, code: str, status: int) -> None:
    path = tmp_path / "exits.py"
    path.write_text(f"import sys\nsys.exit({code})\n")
    assert explain_script(path) == status


def test_missing_script_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E201[\s\S]*nowhere\.py"):
        explain_script(tmp_path / "nowhere.py")


def test_mode_and_options_of_a_script_reach_inductor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inductor.py"
    path.write_text(
        "import torch\n"
        "torch.compile(lambda x: x.sin() + 1, options={'cpp.simdlen': 0, 'epilogue-fusion': True})(torch.ones(64))\n"
        "torch.compile(lambda x: x.cos() + 1, disable=True)(torch.ones(64))\n"
    )
    assert explain_script(path, max_breaks=0) == 0
    out = capsys.readouterr().out
    assert "backend inductor" in out
    assert "cpp_fused_add_sin_0" in out
    assert "ok; 1 graph" in out
