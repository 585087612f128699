"""Scenario `attention`: decode and prefill in one record, by one command, with a roofline of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4_compile import bench, cli
from dsv4_compile.bench import sparse_mla_decode, sparse_mla_prefill, timing

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({}, {"sparse_mla_decode", "sparse_mla_prefill"}),
        ({"fused": {"none"}}, {"sparse_mla_decode"}),
        ({"pattern": {"window"}}, {"sparse_mla_prefill"}),
        ({"fused": {"none"}, "pattern": {"window"}}, set()),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_limit_skips_the_part_without_its_column(limits: dict[str, set[str]], parts: set[str]) -> None:
    record = bench.run("attention", only={"heads": {"64"}, "impl": {"portable"}, **limits}, device=CPU)
    assert {row["op"] for row in record["rows"]} - {"sparse_mla_decode_quant"} == parts


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools, one number of tokens, and samples that are enough for tests."""
    for scenario, settings in ((sparse_mla_decode, {"pool": 512}), (sparse_mla_prefill, {})):
        monkeypatch.setattr(scenario, "problems", partial(scenario.problems, tokens=(2,), **settings))
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)


@pytest.mark.usefixtures("few")
def test_the_command_leaves_a_record_a_table_and_a_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "heads=64", "--only", "op=sparse_mla_decode,sparse_mla_prefill", "--only", "impl=eager"]
    assert cli.main(["bench", "attention", *limits, "--device", "cpu", "--out", str(tmp_path)]) == 0
    names = {"attention.json", "attention.txt", "attention.png", "attention_roofline.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    rows: Iterator[dict[str, object]] = iter(json.loads((tmp_path / "attention.json").read_text())["rows"])
    assert {(row["op"], row["status"]) for row in rows} == {
        (sparse_mla_decode.OP, "ok"),
        (sparse_mla_prefill.OP, "ok"),
    }
    table = capsys.readouterr().out
    assert "sparse_mla_decode, heads 64, keys 640, fused none" in table
    assert "sparse_mla_prefill, heads 64, keys 640, pattern window" in table
