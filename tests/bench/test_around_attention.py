"""examples/benchmarks/around_attention.py: three records in a given time, and the rows that there was no time for."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile.bench import experts, mhc, router

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "around_attention.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the script, with small models of one size."""
    for module in (experts, mhc, router):
        monkeypatch.setattr(module, "TOKENS", {"cpu": (1,)})
    monkeypatch.setattr(experts, "MODELS", {"Flash": experts.Experts(4, 128, 128, 2)})
    monkeypatch.setattr(router, "MODELS", {"Flash": router.Router(8, 64, 2, 1.5)})
    monkeypatch.setattr(mhc, "MODELS", {"Flash": 64})
    return runpy.run_path(str(SCRIPT))


def test_every_scenario_has_a_record_with_its_peers_and_floors(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["--device", "cpu", "--out", str(tmp_path)]) == 0
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(records) == ["experts", "mhc", "router"]
    for record in records.values():
        assert record["commit"] and record["command"] == "python examples/benchmarks/around_attention.py --device cpu"
        assert all(row["floor_us"] > 0 and row["commit"] and row["date"] for row in record["rows"])
    rows = records["experts"]["rows"]
    assert list(dict.fromkeys(row["weights"] for row in rows)) == list(script["FORMATS"])
    timed = {row["impl"] for row in rows if row["us"]}
    assert timed == script["ROUTED"] - {"triton", "marlin"}
    unavailable = {row["impl"]: row["note"] for row in rows if row["status"] == "unavailable"}
    assert unavailable == {"triton": "hand-written kernels run on GPUs", "marlin": "Marlin's kernels run on GPUs"}
    for scenario in ("router", "mhc"):
        assert {row["impl"] for row in records[scenario]["rows"] if row["us"]} == {"transformers"}
    assert "transformers_batched_mm" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_named(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []
    assert "no time for moe_experts Flash, bfloat16, none, 1; " in capsys.readouterr().err
