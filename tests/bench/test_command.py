"""`dsv4 bench` as a command: its output, files and exit status, its scenarios, and arguments that it does not take."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile import bench, cli
from dsv4_compile.bench import gate, indexer, pictures, preprocess, problem, timing
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.selection import measured


@pytest.mark.usefixtures("tiny")
def test_a_record_says_when_kernels_were_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--device", "cpu", "--turn", str(tmp_path / "turn")]
    assert cli.main(["bench", "preprocess", *limits, "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].endswith("--device cpu --trust")


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_a_table_and_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "impl=eager,triton", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "preprocess.json").read_text())
    assert (tmp_path / "preprocess.txt").read_text() == printed
    assert record["command"] == "dsv4 bench preprocess --only op=inv_rope --only impl=eager,triton --device cpu"
    assert {"machine", "driver", "torch", "triton", "commit", "date", "copy_gb_s", "fingerprints"} <= set(record)
    assert all(row["date"] >= record["date"] and row["commit"] == record["commit"] for row in record["rows"])
    for line in ("inv_rope, heads 2: us, wall clock", "triton, unavailable: hand-written kernels run on GPUs"):
        assert line in printed
    assert (tmp_path / "preprocess.png").exists() is bool(importlib.util.find_spec("matplotlib"))


@pytest.mark.usefixtures("tiny")
def test_tune_hands_the_record_to_the_table_of_measurements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(measured, "update", lambda record: seen.append(record) or 0)
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--only", "tokens=5", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--tune"]) == 0
    assert seen[0]["rows"][0]["elements"] == 5 * 2 * 512
    assert capsys.readouterr().err.splitlines()[-1].startswith("0 sizes of both ir and triton written to ")


def test_tune_alone_measures_every_choice_and_exits_with_the_worst_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, bench.Only]] = []

    def run(scenario: str, only: bench.Only, **options: Any) -> dict[str, Any]:
        ran.append((scenario, only))
        return {"rows": [{"status": "wrong" if scenario == "preprocess" else "ok"}]}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "render", lambda record: "")
    monkeypatch.setattr(measured, "update", lambda record: 0)
    assert cli.main(["bench", "--tune"]) == 1
    assert [name for name, _ in ran] == ["preprocess", "indexer"]
    assert cli.main(["bench", "--tune", "--only", "tokens=1"]) == 2
    assert "name one of both" in capsys.readouterr().err
    assert len(ran) == 2


def test_scenarios_of_one_run_take_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, taken = fcntl.flock, []

    def at_once(file: int, how: int) -> None:
        taken.append(file)
        lock(file, how | fcntl.LOCK_NB)

    def run(scenario: str, turn: Callable[[], None], **options: Any) -> dict[str, Any]:
        turn()
        return {"rows": [{"status": "ok"}]}

    monkeypatch.setattr(fcntl, "flock", at_once)
    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "render", lambda record: "")
    monkeypatch.setattr(measured, "update", lambda record: 0)
    assert cli.main(["bench", "--tune", "--turn", str(tmp_path / "turn")]) == 0
    assert len(taken) == 1


def test_every_op_that_has_a_choice_is_among_those_that_are_tuned() -> None:
    limits = bench.choices()
    offered = {case.op for case in indexer.cases(DeepseekV4Config.flash())} | set(preprocess.OPS)
    # Both implementations of fp8_linear run the same GEMM: its quantisation alone is not worth a choice. IR of the
    # experts, their router and hyper-connections always leaves a call to the kernel.
    left = {"fp8_linear", "moe_experts", "moe_route", "mhc_boundary", "mhc_head", "mhc_pre"}
    of_v41 = {"moe_route_images", "mx_linear"}  # no scenario of DeepSeek-V4.1 is tuned
    assert limits["preprocess"]["op"] - offered == left | of_v41
    assert limits["preprocess"]["impl"] == {"ir", "triton"}


@pytest.mark.usefixtures("tiny")
def test_a_wrong_implementation_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "disagreement", lambda got, want: "result 0 is upside down")
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--only", "tokens=1", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["status"], row["note"], row["us"]) == ("wrong", "result 0 is upside down", None)


@pytest.mark.usefixtures("tiny")
def test_a_failed_implementation_fails_the_command_and_an_unavailable_one_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--only", "op=inv_rope", "--only", "tokens=1", "--device", "cpu", "--json"]
    assert cli.main(["bench", "preprocess", *limits, "--only", "impl=eager,triton"]) == 0
    assert [row["status"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["ok", "unavailable"]

    def fault(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(problem, "on_gpu", lambda call: fault)
    assert cli.main(["bench", "preprocess", *limits, "--only", "impl=eager,triton"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["note"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "no scenario 'nothing'; there is attention, attention_backends"),
        (["preprocess", "--only", "token=1"], "no column 'token' in preprocess; there is op, heads, tokens, impl"),
        (["preprocess", "--only", "tokens=3", "--device", "cpu"], "nothing is left to measure after --only tokens=3"),
    ],
)
def test_unknown_scenarios_columns_and_sizes_are_errors(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "copy_rate", lambda device: 1e9)
    assert cli.main(["bench", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_an_unwritable_file_is_an_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda *args, **options: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert cli.main(["bench", "preprocess", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"--out {tmp_path / 'file'}: File exists\n"
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda path, how: False)
        assert cli.main(["bench", "preprocess", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"--out {tmp_path}: nothing can be written there\n"
    monkeypatch.setattr(measured, "RECORD", tmp_path / "nowhere" / "measured.json")
    assert cli.main(["bench", "preprocess", "--tune"]) == 2
    assert "which is read-only" in capsys.readouterr().err


def test_unusable_options_are_errors_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda *args, **options: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "preprocess", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "--device cuda: torch finds no GPU\n"
    assert cli.main(["bench", "preprocess", "--turn", str(tmp_path / "nowhere" / "turn")]) == 2
    assert capsys.readouterr().err == f"--turn {tmp_path / 'nowhere' / 'turn'}: No such file or directory\n"
    assert cli.main(["bench", "--tune", "--json"]) == 2
    assert "--json prints one record" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_a_run_without_rows_keeps_the_previous_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "copy_rate", lambda device: 1e9)
    (tmp_path / "preprocess.json").write_text("before")
    limits = ["--only", "op=inv_rope", "--only", "impl=eagre", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--out", str(tmp_path)]) == 2
    assert "nothing is left to measure" in capsys.readouterr().err
    assert (tmp_path / "preprocess.json").read_text() == "before"


@pytest.mark.usefixtures("tiny")
def test_limits_of_a_column_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "op=q_norm_rope", "--only", "impl=eager", "--only", "tokens=1"]
    assert cli.main(["bench", "preprocess", *limits, "--device", "cpu", "--json"]) == 0
    assert [row["op"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["q_norm_rope", "inv_rope"]


@pytest.mark.usefixtures("tiny")
def test_values_of_a_limit_that_no_row_has_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "impl=eager,trition", "--only", "tokens=1,4"]
    assert cli.main(["bench", "preprocess", *limits, "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "nothing was measured of impl=trition, tokens=4"
    assert [row["impl"] for row in json.loads(printed.out)["rows"]] == ["eager"]


def test_the_command_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.SCENARIOS)


def test_missing_matplotlib_is_an_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    assert cli.main(["bench", "preprocess", "--device", "cpu", "--png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
