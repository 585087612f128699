"""`explain(dump=...)`: sources are written with depyf, without it, and where it fails."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug.report import Report


def branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    return y


def straight(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def explain(function: object, folder: Path) -> Report:
    report = dsv4_compile.explain(function, torch.ones(4), backend="eager", dump=folder)
    assert report.failure is None
    assert (folder / "graph_1.py").read_text()
    assert Report.from_json((folder / "report.json").read_text()) == report
    assert (folder / "report.txt").read_text() == report.text()
    return report


@pytest.mark.parametrize("function", [straight, branch])
def test_depyf_writes_what_it_can_and_never_fails_the_run(
    function: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = explain(function, tmp_path)
    if importlib.util.find_spec("depyf") is None:
        assert any("depyf is not installed" in note for note in report.notes)
    else:
        # depyf 0.20 cannot read the bytecode of Python 3.13.
        said = "depyf wrote" if sys.version_info < (3, 13) else "depyf stopped"
        assert any(said in note for note in report.notes)
        assert any((tmp_path / "depyf").iterdir())
    assert "Traceback" not in capfd.readouterr().err


def test_missing_depyf_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    report = explain(straight, tmp_path)
    assert any("depyf is not installed" in note and "[debug]" in note for note in report.notes)


def test_depyf_that_raises_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def prepare_debug(folder: str) -> Iterator[None]:
        yield
        raise RuntimeError(f"cannot decompile into {folder}")

    monkeypatch.setitem(sys.modules, "depyf", types.SimpleNamespace(prepare_debug=prepare_debug))
    report = explain(branch, tmp_path)
    assert any("depyf stopped at RuntimeError: cannot decompile" in note for note in report.notes)
    assert len(report.breaks) == 1


def test_generated_code_is_written_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    dsv4_compile.explain(straight, torch.ones(64), backend="inductor", dump=tmp_path)
    assert "async_compile" in (tmp_path / "graph_1_generated.py").read_text()
