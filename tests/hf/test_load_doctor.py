"""Tests of `dsv4 doctor PATH`: the report of a checkpoint folder, which is not loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import cli
from dsv4_compile.cache import PagedCaches
from dsv4_compile.hf.loading import folder_report
from dsv4_compile.hf.loading.checkpoint import read_checkpoint
from dsv4_compile.hf.loading.placement import place
from dsv4_compile.parallel.split import split_of
from tests.hf import official

GIGA = 10**9


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.make(tmp_path_factory.mktemp("official"))[0]


def report(capsys: pytest.CaptureFixture[str], path: Path, status: int) -> dict[str, dict[str, str]]:
    assert cli.main(["doctor", str(path), "--json"]) == status
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_whole_folder_is_described(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, good, 0)
    stored = sum(file.stat().st_size for file in official.files(good))
    assert found["folder"]["value"] == f"{good}, 4 files, {stored / GIGA:.2f} GB"
    assert found["layers"]["value"] == "4 (1 SWA, 2 CSA, 1 HCA), 1 routed by hash; 4 experts, 2 a token"
    assert found["tensors"]["value"].endswith(" with DeepSeek's names")
    assert found["experts"]["value"].startswith("0.00 GB in 96 tensors (I8 0.00, F8_E8M0 0.00)")
    assert {row["level"] for row in found.values()} == {"ok"}
    kinds = [found[kind]["value"] for kind in folder_report.KINDS]
    assert sum(int(value.split(" in ")[1].split()[0]) for value in kinds) == int(found["tensors"]["value"].split()[0])


def test_gpus_are_counted_by_what_each_holds(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = place(read_checkpoint(good))
    split = weights.nbytes(lambda name: split_of(name) is not None)
    room = {count: (weights.nbytes() - split + split / count) / 0.9 for count in (1, 2, 8)}
    monkeypatch.setattr(folder_report, "FILLED", 0.9)
    monkeypatch.setattr(PagedCaches, "nbytes", 0)
    sizes = {"one": room[1] + 2, "two": room[1] - 2, "many": room[8] - 2}
    monkeypatch.setattr(folder_report, "GPUS", {name: size / 2**30 for name, size in sizes.items()})
    found = {row.name: row.value for row in folder_report.rows(good)}
    assert room[2] < 0.9 * room[1]
    assert [found[name].partition(" of ")[0] for name in sizes] == ["1", "2", "more than 8"]


def test_the_report_is_a_table_with_a_verdict(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    folder ") and lines[-1] == "verdict: all is well"
    assert any(line.split()[:2] == ["ok", "H200"] and "GB of weights each" in line for line in lines)


def test_all_problems_are_listed(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            del tensors[f"layers.{layer}.attn.wq_a.weight"]
            for expert in range(4):
                name = f"layers.{layer}.ffn.experts.{expert}.w1.weight"
                tensors[name] = tensors[name][1:].clone()
                tensors[f"{name}.copy"] = torch.zeros(1)

    folder = official.changed(good, tmp_path / "spoilt", spoil)
    assert cli.main(["doctor", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    faults = [line for line in lines if line.startswith("fix")]
    assert len(faults) == folder_report.MOST_PROBLEMS + 1
    assert faults[0].split()[:2] == ["fix", "E207"] and "no tensor layers.0.attn.wq_a.weight" in faults[0]
    # Four missing weights, whose scales are then too many, 16 of a wrong shape and 16 too many.
    assert faults[-1].split()[1:] == ["more", str(4 + 4 + 16 + 16 - 20), "problems", "like", "these"]


@pytest.mark.parametrize(
    ("config", "code"),
    [({"model_type": "deepseek_v3"}, "E205"), ({"compress_ratios": [0, 2, 2, 0]}, "E205")],
)
def test_another_model_is_named(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], code: str
) -> None:
    folder = official.copied(good, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(official.CONFIG | config))
    found = report(capsys, folder, 1)
    assert (found[code]["level"], found["folder"]["level"]) == ("fix", "ok")


def test_a_path_that_is_no_folder_of_a_checkpoint_is_one_line_to_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, got in (("nothing", "no folder"), ("file", "a file"), ("empty", "no config.json")):
        found = report(capsys, tmp_path / name, 1)
        assert list(found) == ["E209"] and found["E209"]["level"] == "fix" and got in found["E209"]["value"]


def test_a_gpu_of_this_machine_comes_first(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = type("Facts", (), {"name": "NVIDIA H100", "total_memory": 79 * 2**30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    names = [row.name for row in folder_report.rows(good)]
    assert names.index("NVIDIA H100, here") < names.index("H100")


def test_without_transformers_the_report_says_what_to_install(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dsv4_compile.hf.loading.folder_report", None)
    found = report(capsys, good, 1)
    assert "dsv4-compile[hf]" in found["transformers"]["note"]
