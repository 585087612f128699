"""examples/benchmarks/one_rank.py: a rank without the others, on this CPU, and its records."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4_compile.bench import decode_layers, nodes
from dsv4_compile.parallel import Ranks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "one_rank.py"
TRIAL = ["--tiny", "--eager"]


@pytest.fixture
def split_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of the scripts that split a model."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("split_model")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, split_model: ModuleType) -> dict[str, Any]:
    """Return the names of the script, with few steps."""
    monkeypatch.setattr(split_model, "STEPS", 1)
    return runpy.run_path(str(SCRIPT))


def record(folder: Path, part: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / f"one_rank_{part}.json").read_text())
    assert contents["collectives"].startswith("excluded: ") and contents["commit"] and contents["copy_gb_s"] > 0
    assert all(row["date"] and row["commit"] for row in contents["rows"])
    return contents


def test_layers_of_each_kind_are_timed_beside_one_rank(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[decode_layers.Layers] = []
    random_layers = decode_layers.random_layers
    monkeypatch.setattr(decode_layers, "random_layers", lambda *args: built.append(random_layers(*args)) or built[-1])
    assert script["main"](["--parts", "attention", "--ranks", "1,8", "--out", str(tmp_path), *TRIAL]) == 0
    attention = record(tmp_path, "attention")
    said = "python examples/benchmarks/one_rank.py --parts attention --ranks 1,8 --eager --tiny"
    assert attention["command"] == said, "without folders of this machine"
    assert attention["verdicts"] == [], "of batch 32"
    rows = attention["rows"]
    assert [(row["ranks"], row["layer"]) for row in rows] == [(n, kind) for n in (1, 8) for kind in script["MOST"]]
    assert [[layer.config.num_heads for layer in model.layers] for model in built] == [[8]] * 3 + [[1]] * 3
    for one, of_eight in zip(rows[:3], rows[3:], strict=True):
        assert one["status"] == of_eight["status"] == "ok", of_eight["note"]
        assert one["weights"] == "fp8" and one["of_one"] == 1
        assert of_eight["of_one"] == round(of_eight["us"] / one["us"], 3)
        assert of_eight["bytes"] < one["bytes"]
    assert "collectives excluded" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


def test_steps_of_a_whole_rank_are_timed_beside_the_floor_of_its_weights(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bytes_of = {}
    for size, batches in ((1, [1]), (2, [1, 2])):
        sizes = ["--layers", "2", "--prompt", "1", "--whole-ranks", str(size)]
        sizes += ["--batches", ",".join(map(str, batches))]
        assert script["main"](["--parts", "whole", *sizes, "--out", str(tmp_path), *TRIAL]) == 0
        contents = record(tmp_path, "whole")
        assert [(row["batch"], row["ranks"], row["layers"]) for row in contents["rows"]] == [
            (n, size, 2) for n in batches
        ]
        assert all(row["step_ms"] > 0 and "floor_ms" in row for row in contents["rows"])
        bytes_of[size] = contents["bytes_of_a_rank"]
    assert 0.5 < bytes_of[2] / bytes_of[1] < 0.9  # what ranks share is whole on each
    assert "collectives excluded" in capsys.readouterr().out


def test_tokens_of_a_step_are_in_the_part_of_the_vocabulary_that_the_rank_has(script: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []

    def model(ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        seen.append(ids)
        return SimpleNamespace(logits=torch.zeros(*ids.shape, 12))

    model.config = SimpleNamespace(vocab_size=12)  # type: ignore[attr-defined]
    row = script["steps"](model, mock.Mock(), 64, 2, Ranks(1, 3, "tp"), torch.device("cpu"))
    assert row["prompt"] == 2 and len(seen) == 2 + 3 + 3
    assert {int(token) for token in seen[0].flatten()} == {4, 5, 6, 7}


def test_each_of_two_parts_is_a_process_of_its_own(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(call: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append(call[2:])
        return subprocess.CompletedProcess(call, returncode=-9 * len(calls) + 9)

    monkeypatch.setattr(subprocess, "run", run)
    assert script["main"](TRIAL) == 1, "the second one was killed"
    assert calls == [[*TRIAL, "--parts", name] for name in ("attention", "whole")]
    with pytest.raises(SystemExit):
        script["main"](["--parts", "attention,half"])


def test_shares_of_one_rank_are_compared_with_their_bounds(script: dict[str, Any]) -> None:
    of = {"layer": "SWA", "end": "together", "tokens": 32, "cold_us": None}
    rows = [of | {"ranks": 1, "us": 50.0}, of | {"ranks": 8, "us": 27.5}, of | {"ranks": 8, "us": None}]
    script["shares"](rows)
    assert [row.get("of_one") for row in rows] == [1.0, 0.55, None]
    assert script["verdicts"](rows) == ["SWA, 8 ranks, batch 32: 0.55 of one rank, within 0.55"]
    rows[1]["of_one"] = 0.56
    assert script["verdicts"](rows) == ["SWA, 8 ranks, batch 32: 0.56 of one rank, above 0.55"]


def test_a_rank_reads_the_experts_that_its_tokens_touch_and_a_row_a_token(split_model: ModuleType) -> None:
    config = split_model.configuration(1, True, n_routed_experts=4, num_experts_per_tok=1)
    nbytes = {"model.embed_tokens.weight": 10**9, "lm_head.weight": 10**9, "layer.mlp.experts.down_proj": 4 * 10**9}
    assert [split_model.weights_read(config, batch, nbytes) for batch in (1, 2, 10**6)] == [2.0, 2.75, 5.0]


def test_launches_of_graphs_are_counted_beside_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ["cudaGraphLaunch", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaDeviceSynchronize"]
    host += ["hipGraphLaunch", "hipModuleLaunchKernel"]
    events = [SimpleNamespace(name=name, device_type=SimpleNamespace(name="CPU")) for name in host]
    events.append(SimpleNamespace(name="cudaLaunchKernel_like", device_type=SimpleNamespace(name="CUDA")))
    profile = mock.MagicMock()
    profile.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[int] = []
    assert nodes.launches_of_host(lambda: calls.append(1)) == {"graph_launches": 2, "launches": 4}
    assert calls == [1]
