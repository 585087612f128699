"""Tests of folders from a hostile world: loaded or an error with a code, in bounded time and memory, nothing executed.

A sample runs by default, spread over the tables; `make hostile` runs every case.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import DeepseekV4Config, cli, doctor, hf
from dsv4_compile.hf.loading import folder_report
from dsv4_compile.loading import load_attention_from_safetensors
from dsv4_compile.modules import DeepseekV4Attention
from tests.hf import hostile, official, watched_load

IMPORTED = (doctor, folder_report)
"""Modules that a command imports when it runs; their files would count as opened by a folder."""

EVERY = os.environ.get("DSV4_HOSTILE") == "all"
STEP = {"values": 1 if EVERY else 41, "folders": 1 if EVERY else 7}
"""Every how many cases of a table is run."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = official.make(tmp_path_factory.mktemp("official"))[0]
    (folder.parent / "secret.json").write_text("{}")
    load(folder)  # imports what loading imports
    return folder


@pytest.fixture(scope="module")
def layer(good: Path) -> DeepseekV4Attention:
    return DeepseekV4Attention(DeepseekV4Config.from_hf(good), 1, fp8=True, max_seq_len=64)


def load(folder: Path) -> None:
    hf.load(folder, max_batch_size=1, max_seq_len=64, device="cpu")


def doctor(folder: Path) -> None:
    cli.main(["doctor", str(folder), "--json"])


def run(table: dict[str, hostile.Spoil], good: Path, calls: dict[str, Callable[[Path], Any]]) -> dict[str, Any]:
    """Run calls on each case; return faults by case, after a line with the counts."""
    watch, counts, faults = watched_load.Watch.installed(), Counter[str](), {}
    most = watched_load.Outcome("ok")
    for number, (name, spoil) in enumerate(table.items()):
        folder = good.parent / f"case{number}"
        shutil.copytree(good, folder, copy_function=os.link)
        spoil(folder)
        for label, call in calls.items():
            outcome = watch.run(folder, lambda call=call, folder=folder: call(folder))
            counts[f"{label} {outcome.ended}"] += 1
            most.seconds = max(most.seconds, outcome.seconds)
            most.megabytes = max(most.megabytes, outcome.megabytes)
            if outcome.faults:
                faults[f"{label} {name}"] = outcome.faults
        shutil.rmtree(folder)
    print(f"{len(table)} cases, at most {most.seconds:.1f} s and {most.megabytes:.0f} MB: {json.dumps(counts)}")
    return faults


def sampled(table: dict[str, hostile.Spoil], step: int) -> dict[str, hostile.Spoil]:
    return dict(list(table.items())[::step])


def test_no_value_of_a_configuration_ends_in_a_traceback(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = hostile.values()
    assert len(table) >= 1000
    faults = run(sampled(table, STEP["values"]), good, {"load": load, "doctor": doctor})
    with capsys.disabled():
        print(capsys.readouterr().out.splitlines()[-1] if EVERY else "", end="\n" if EVERY else "")
    assert faults == {}


def test_no_folder_ends_in_a_traceback(
    good: Path, layer: DeepseekV4Attention, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(folder: Path) -> None:
        load_attention_from_safetensors(layer, folder, prefix="layers.1.attn.")

    table = hostile.folders()
    assert len(table) >= 230
    calls = {"load": load, "doctor": doctor, "attention": attention}
    faults = run(sampled(table, STEP["folders"]), good, calls)
    with capsys.disabled():
        print(capsys.readouterr().out.splitlines()[-1] if EVERY else "", end="\n" if EVERY else "")
    assert faults == {}
