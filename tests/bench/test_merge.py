"""Records of runs side by side become one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import bench
from dsv4_compile.errors import InputError
from dsv4_compile.selection import measured

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "examples" / "results" / "metadata_h200_2026-11-20.json"


@pytest.fixture
def parts() -> list[dict[str, Any]]:
    """A record in two, of different times, commands and copy rates."""
    record = json.loads(RECORD.read_text())
    rows, half = record["rows"], len(record["rows"]) // 2
    later = {"date": "2027-01-01T00:00:00+00:00", "command": "the same again", "copy_gb_s": record["copy_gb_s"] + 2}
    return [{**record, "rows": rows[:half]}, {**record, "rows": rows[half:], **later}]


def test_rows_and_commands_come_in_order_with_the_first_date(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, part in zip(paths, parts, strict=True):
        path.write_text(json.dumps(part))
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    assert merge([*map(str, paths), "--out", str(tmp_path), "--name", "both", *["--png"] * bench.can_draw()]) == 0
    assert (tmp_path / "both.png").exists() is bench.can_draw()
    merged, whole = json.loads((tmp_path / "both.json").read_text()), json.loads(RECORD.read_text())
    assert merged["rows"] == whole["rows"]
    assert merged["date"] == whole["date"]
    assert merged["copy_gb_s"] == whole["copy_gb_s"] + 1
    assert list(merged) == list(whole)
    assert f"{whole['command']};\n         the same again\n" in (tmp_path / "both.txt").read_text()


def test_what_is_merged_can_be_what_auto_goes_by(
    parts: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[dict[str, Any]] = []
    monkeypatch.setattr(measured, "update", lambda record: tuned.append(record) or 0)
    (tmp_path / "part.json").write_text(json.dumps(parts[0]))
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    assert merge([str(tmp_path / "part.json"), "--out", str(tmp_path), "--tune"]) == 0
    assert [record["rows"] for record in tuned] == [parts[0]["rows"]]


def test_what_is_measured_again_replaces_the_former(parts: list[dict[str, Any]]) -> None:
    first, again = parts[0]["rows"], [{**row, "us": row["us"] + 1} for row in parts[0]["rows"][:2]]
    merged = bench.merge([parts[0], {**parts[1], "rows": again}])
    assert merged["rows"] == [*again, *first[2:]]


def test_runs_of_different_machines_are_not_merged(parts: list[dict[str, Any]]) -> None:
    parts[1]["machine"] = "another"
    with pytest.raises(InputError, match="different machine"):
        bench.merge(parts)


def test_a_fact_that_only_one_run_tells_hides_no_other_difference(parts: list[dict[str, Any]]) -> None:
    others = [{**parts[1], "clock": "boosted"}, {**parts[1], "machine": "another"}]
    with pytest.raises(InputError, match="different clock"):
        bench.merge([parts[0], *others])


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_what_is_no_record_is_refused_by_its_name(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "part.json"
    if text is not None:
        path.write_text(text)
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    with pytest.raises(SystemExit):
        merge([str(RECORD), str(path), "--out", str(tmp_path)])
    assert f"{path} is no record" in capsys.readouterr().err
