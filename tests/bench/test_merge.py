"""examples/benchmarks/merge.py: records of several runs become one."""

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
LATER = "2027-01-01T00:00:00+00:00"


@pytest.fixture
def whole() -> dict[str, Any]:
    """Return a record from before rows had dates and commits."""
    facts = {"machine": "a GPU", "driver": "580", "torch": "2.11", "triton": "3.6", "python": "3.12"}
    row = {"op": "advance", "query": 1, "impl": "triton", "published_us": {}, "us": 2.0, "cold_us": None, "note": ""}
    row |= {"status": "ok", "clock": "cuda graph", "launches": 1, "bytes": 64, "flops": 0, "floor_us": 0.5}
    rows = [row | {"tokens": tokens, "gb_s": 1.0, "of_copy": 0.1} for tokens in (1, 8, 32, 128)]
    run = {"date": "2026-11-20T12:49:38+00:00", "command": "dsv4 bench metadata", "copy_gb_s": 4200.0}
    return {"scenario": "metadata", **facts, **run, "commit": "before", "fingerprints": {}, "rows": rows}


@pytest.fixture
def parts(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The record in two, of different times, commits, commands and copy rates."""
    rows, half = whole["rows"], len(whole["rows"]) // 2
    later = {"date": LATER, "commit": "after", "command": "the same again", "copy_gb_s": whole["copy_gb_s"] + 2}
    return [{**whole, "rows": rows[:half]}, {**whole, "rows": rows[half:], **later}]


def test_rows_keep_the_dates_and_commits_of_their_runs(
    whole: dict[str, Any], parts: list[dict[str, Any]], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, record in zip(paths, parts, strict=True):
        path.write_text(json.dumps(record))
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    assert merge([*map(str, paths), "--out", str(tmp_path), "--name", "both", *["--png"] * bench.can_draw()]) == 0
    assert (tmp_path / "both.png").exists() is bench.can_draw()
    merged = json.loads((tmp_path / "both.json").read_text())
    stamps = [(row.pop("date"), row.pop("commit")) for row in merged["rows"]]
    assert merged["rows"] == whole["rows"]
    assert stamps == [(whole["date"], "before")] * 2 + [(LATER, "after")] * 2
    assert (merged["date"], merged["commit"]) == (LATER, "before; after")
    assert merged["copy_gb_s"] == whole["copy_gb_s"] + 1
    assert list(merged) == list(whole)
    text = (tmp_path / "both.txt").read_text()
    assert f"{whole['command']};\n         the same again\n" in text
    assert "rows     measured from 2026-11-20 to 2027-01-01\n" in text


def test_a_row_that_was_merged_before_keeps_its_date(parts: list[dict[str, Any]]) -> None:
    again = bench.merge([bench.merge(parts[:1]), parts[1]])
    assert [row["date"] for row in again["rows"]] == [parts[0]["date"]] * 2 + [LATER] * 2
    twice = bench.merge([bench.merge(parts), {**parts[0], "rows": parts[0]["rows"][:1], "date": "2028"}])
    assert [row["date"][:4] for row in twice["rows"]] == ["2028", "2026", "2027", "2027"]


def test_rows_of_different_machine_code_are_not_merged(parts: list[dict[str, Any]]) -> None:
    parts[0]["fingerprints"], parts[1]["fingerprints"] = {"advance": "a", "global_topk": "x"}, {"advance": "a"}
    assert bench.merge(parts)["fingerprints"] == {"advance": "a", "global_topk": "x"}
    parts[1]["fingerprints"] = {"advance": "b"}
    with pytest.raises(InputError, match="different machine code of advance"):
        bench.merge(parts)


def test_a_merged_record_can_tune_auto(
    parts: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[dict[str, Any]] = []
    monkeypatch.setattr(measured, "update", lambda record: tuned.append(record) or 0)
    (tmp_path / "part.json").write_text(json.dumps(parts[0]))
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    assert merge([str(tmp_path / "part.json"), "--out", str(tmp_path), "--tune"]) == 0
    assert [[row["us"] for row in record["rows"]] for record in tuned] == [[row["us"] for row in parts[0]["rows"]]]


def test_a_row_that_is_measured_again_replaces_the_earlier_one(parts: list[dict[str, Any]]) -> None:
    first, again = parts[0]["rows"], [{**row, "us": row["us"] + 1} for row in parts[0]["rows"][:2]]
    merged = bench.merge([parts[0], {**parts[1], "rows": again}])
    assert [row["us"] for row in merged["rows"]] == [row["us"] for row in [*again, *first[2:]]]
    assert [row["date"] for row in merged["rows"]][:2] == [LATER] * 2


def test_runs_of_different_machines_are_not_merged(parts: list[dict[str, Any]]) -> None:
    parts[1]["machine"] = "another"
    with pytest.raises(InputError, match="different machine"):
        bench.merge(parts)


def test_a_fact_that_only_one_run_tells_hides_no_other_difference(parts: list[dict[str, Any]]) -> None:
    others = [{**parts[1], "clock": "boosted"}, {**parts[1], "machine": "another"}]
    with pytest.raises(InputError, match="different clock"):
        bench.merge([parts[0], *others])


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_file_that_is_no_record_is_an_error_with_its_name(
    text: str | None, whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, record = tmp_path / "part.json", tmp_path / "record.json"
    record.write_text(json.dumps(whole))
    if text is not None:
        path.write_text(text)
    merge = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "merge.py"))["main"]
    with pytest.raises(SystemExit):
        merge([str(record), str(path), "--out", str(tmp_path)])
    assert f"{path} is no record" in capsys.readouterr().err
