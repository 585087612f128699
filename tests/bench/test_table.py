"""Records as tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import bench
from dsv4_compile.bench import pictures, table


def test_a_table_shows_warm_and_cold_times_the_best_and_the_launches() -> None:
    row = {"op": "x", "heads": 64, "tokens": 8, "published_us": {"vLLM": 2.8}, "status": "ok", "note": ""}
    row |= {"clock": "cuda graph", "bytes": 1, "flops": 0, "floor_us": 0.75, "gb_s": 100.0, "of_copy": 0.25}
    measured = [
        row | {"impl": "ir", "us": 5.0, "cold_us": 6.0, "launches": 2},
        row | {"impl": "triton", "us": 2.5, "cold_us": 3.25, "launches": 1},
    ]
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    lines = table.render({**facts, "rows": measured}).splitlines()
    assert lines[-4] == "x, heads 64: us warm / cold, CUDA graph"
    assert lines[-3].split() == ["tokens", "ir", "triton", "vLLM", "floor", "best", "GB/s", "of", "copy"]
    assert lines[-2].split() == ["8", "5.00", "/", "6.00", "2.50", "/", "3.25", "2.8", "0.75", "triton", "100", "25%"]
    assert lines[-1].split() == ["launches", "2", "1"]


def test_the_best_is_by_cold_times_only_if_all_have_one() -> None:
    row = {"us": 5.0, "cold_us": 8.0, "impl": "graph", "gb_s": 100.0}
    other = row | {"us": 6.0, "cold_us": 7.0, "impl": "other"}
    assert table._best({"graph": row, "other": other}, ["gb_s"]) == ["other", "100"]
    assert table._best({"graph": row, "other": other | {"cold_us": None}}, ["gb_s"]) == ["graph", "100"]
    assert table._best({"graph": row | {"us": None}}, ["gb_s"]) == ["", ""]


def test_a_table_says_commit_and_the_days_of_its_rows() -> None:
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "command", "copy_gb_s"), "?")
    rows = [timed(tokens=t, launches=None, gb_s=1.0, of_copy=0.1, date=f"2026-11-2{t}T10:00:00+00:00") for t in (1, 3)]
    text = table.render({**facts, "date": "2026-11-23", "commit": "0123abc", "rows": rows})
    assert "commit   0123abc\n" in text
    assert "rows     measured from 2026-11-21 to 2026-11-23\n" in text
    assert "measured from" not in table.render({**facts, "date": "2026-11-23", "rows": rows[:1]})


def test_a_table_shows_the_temporary_memory_of_calls() -> None:
    """As the largest multiple of the results, or in MiB if there are none."""
    rows = []
    for size, result, extra in ((1, 64, 16), (8, 512, 384)):
        rows.append(timed(tokens=size, impl="ir", result_bytes=result, temporary_bytes=extra))
        rows.append(timed(tokens=size, impl="triton", result_bytes=0, temporary_bytes=0))
        rows.append(timed(tokens=size, impl="copies", result_bytes=0, temporary_bytes=size << 20))
    rows = [row | {"launches": None, "gb_s": 1.0, "of_copy": 0.1} for row in rows]
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    last = table.render({**facts, "rows": rows}).splitlines()[-1]
    assert last.split() == ["temporaries", "0.75x", "none", "8.0", "MiB"]


def test_implementations_that_are_unavailable_for_one_reason_share_a_line() -> None:
    rows = [timed(tokens=t, impl=i, us=None, status="unavailable", note="no GPU") for t in (1, 8) for i in ("a", "b")]
    for row in rows:
        row |= {"gb_s": None, "of_copy": None}
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    assert table.render({**facts, "rows": rows}).splitlines()[-1] == "  a, b, unavailable: no GPU"


def test_a_table_says_which_implementations_were_timed_otherwise() -> None:
    more = {"tokens": 1, "launches": None, "gb_s": 1.0, "of_copy": 0.5}
    rows = [timed(**more), timed(impl="eager", **more) | {"clock": "stream"}]
    text = bench.render({"rows": rows, "copy_gb_s": 1.0})
    assert ", wall clock" in text and "\n  eager: consecutive calls" in text
    assert "consecutive calls" not in bench.render({"rows": rows[:1], "copy_gb_s": 1.0})


def timed(**columns: Any) -> dict[str, Any]:
    row = {"op": "x", "heads": 64, "impl": "ir", "published_us": {"vLLM": 2.8}, "us": 5.0, "cold_us": None, "note": ""}
    return row | {"clock": "wall clock", "bytes": 64, "flops": 0, "floor_us": 0.75} | columns


@pytest.mark.parametrize(("flops", "names"), [(0, ["s.png"]), (1000, ["s.png", "s_roofline.png"])])
def test_pictures_are_next_to_the_record(tmp_path: Path, flops: int, names: list[str]) -> None:
    rows = [timed(tokens=1, flops=flops), timed(tokens=8, us=None, flops=flops)]
    record = {"scenario": "s", "machine": "m", "date": "2026-11-20", "copy_gb_s": 4300.0, "rows": rows}
    assert [path.name for path in bench.draw(record, tmp_path)] == names
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    assert bench.draw(record | {"rows": rows[1:]}, tmp_path) == []


def test_a_roof_is_flat_where_tensor_cores_are_the_limit_and_nowhere_else() -> None:
    """790 and 1580 TFLOP/s, each of several sizes; rows that memory bounds, or without GEMMs, have no flat roof."""
    rows = [timed(flops=790_000_000 * us, bytes=1000 * us, floor_us=us) for us in (2.0, 99.003)]
    rows += [timed(flops=1_580_000_000, bytes=1000, floor_us=1.001), timed(flops=10**6, bytes=43_000, floor_us=0.01)]
    rows += [timed(flops=10**9, bytes=43_000_000, floor_us=10.0), timed(flops=0, bytes=10**9, floor_us=250.0)]
    rows += [timed(flops=10**9, floor_us=None)]
    assert pictures.flat_roofs({"copy_gb_s": 4300.0, "rows": rows}) == [790.0, 1580.0]
