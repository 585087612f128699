"""Tests of the scripts that measure starts, loading and new prompt lengths, and of the tables from their records."""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile.hf.start import MEANINGS, Start
from tests.tools import figures, figures_starts

BENCHMARKS = figures.ROOT / "examples" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a script's definitions, and returns their names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda path: runpy.run_path(str(path), run_name="script")


def check_record(path: Path, scenario: str, figure: str) -> list[list[str]]:
    """Return the lines of a table from the record at `path`, which says how it was measured."""
    record = json.loads(path.read_text())
    assert record["scenario"] == scenario and path.name == f"{scenario}.json"
    assert scenario in record["command"] and record["machine"] and record["rows"]
    assert all(row["date"] and row["commit"] for row in record["rows"])
    render = figures_starts._TABLES[figure][0]
    lines, shown = render({scenario: record["rows"]})
    assert shown and len(lines) == 1 + len(shown) and len({len(line) for line in lines}) == 1
    return lines


def test_a_folder_of_official_formats_is_read_and_recorded(script: Any, tmp_path: Path) -> None:
    tiny = script(BENCHMARKS / "starts.py")["TINY"]
    main = script(BENCHMARKS / "read_weights.py")["main"]
    sizes = ["--layers", "1", "--threads", "1", "--repeats", "1", "--sizes", json.dumps(tiny)]
    main([*sizes, "--device", "cpu", "--folder", str(tmp_path), "--out", str(tmp_path)])
    lines = check_record(tmp_path / "read_weights.json", "read_weights", "read_weights")
    assert [line[0] for line in lines[1:]] == [
        "read, 1 thread",
        "copy to the device",
        "safetensors",
        "hf.load, 1 threads",
    ]
    assert all(float(cell) >= 0 for line in lines[1:] for cell in line[1:])


def test_starts_are_recorded_without_and_with_a_compiled_folder(script: Any, tmp_path: Path) -> None:
    names, asked = script(BENCHMARKS / "starts.py"), list[Mapping[str, Any]]()

    def measure_start(folder: Path, **arguments: Any) -> Start:
        assert (folder / "config.json").exists()
        asked.append(arguments)
        seconds = dict.fromkeys(MEANINGS, 1.0) | {"read": 3.0}
        return Start(seconds, sum(seconds.values()), graphs=3, captures=5, capture_bytes=1 << 20)

    names["main"].__globals__.update(measure_start=measure_start, build=lambda *_: 7.0)
    assert names["main"](["--tiny", "--layers", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert [("compiled" in asks, asks["empty_caches"]) for asks in asked] == [(False, True), (True, True)]
    assert asked[1]["compiled_required"] is True
    lines = check_record(tmp_path / "starts.json", "starts", "starts")
    assert [line[1] for line in lines[1:]] == ["empty caches", "compiled="]
    assert lines[1][-2:] == ["12.0", "9.0"]
    names["main"].__globals__.update(measure_start=lambda *_, **__: Start(why="E502"))
    with pytest.raises(RuntimeError, match="empty caches: E502"):
        names["main"](["--tiny", "--layers", "1", "--device", "cpu"])


def test_new_lengths_are_recorded_by_length_and_all_sizes_together(script: Any, tmp_path: Path) -> None:
    names = script(figures.ROOT / "tests" / "gpu" / "new_lengths.py")
    calls = [{"size": [1, 7], "steps": [64], "ms": 3.0, "median_ms": 2.0}]
    calls.append({"size": [2, 70], "steps": [144], "ms": 3.0, "median_ms": 3.0})
    new = {"64": {"first_token_ms": 5.96, "kernels_ms": 4.43, "kernels": 99}, "8192": {"first_token_ms": 42.8}}
    row = {"start_s": 104.0, "seconds": {}, "captures": 29, "capture_bytes": 2 << 30, "late": ["one"]}
    row |= {"built_one_by_one": [], "calls": calls, "new": new}
    args = argparse.Namespace(device="cpu", layers=4, experts=64, calls=2)
    (tmp_path / "new_lengths.json").write_text(json.dumps(names["record"](row, args)))
    lines = check_record(tmp_path / "new_lengths.json", "new_lengths", "new_lengths")
    assert lines[1:] == [["64", "6.0", "4.4", "99"], ["8,192", "42.8", "-", "-"]]
    lines = check_record(tmp_path / "new_lengths.json", "new_lengths", "late_work")
    assert lines[1] == ["2", "104", "29", "2.0", "1", "1.5"]
    said: list[str] = []
    assert names["report"]({**row, "warm_up": ""}, said.append) == 1
    assert any("[1, 7]" in line for line in said)


def test_a_table_is_known_once_its_record_is_there(tmp_path: Path) -> None:
    assert figures_starts.measured(tmp_path) == {}
    (tmp_path / "new_lengths.json").write_text("{}")
    records = figures_starts.measured(tmp_path)
    assert records == {"new_lengths": "new_lengths.json"}
    assert set(figures_starts.tables(records)) == {"new_lengths", "late_work"}
    assert set(figures.FIGURES) >= set(figures_starts.tables(figures_starts.measured(figures.RESULTS)))
