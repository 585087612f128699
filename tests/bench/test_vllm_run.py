"""tests/gpu/vllm/run.py without vLLM: what it plans, the record that it writes, and the tables of that."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.vllm import run
from tests.gpu.vllm.real_checkpoint import Fp8Weights, real_config
from tests.tools import figures, figures_vllm
from tests.vllm import jobs

PAGE = figures.ROOT / "dsv4_compile" / "docs" / "vllm.md"
ENGINE = """
import json, os, sys
job = json.load(open(sys.argv[1]))
if os.environ["DSV4_VLLM"] == "0":
    print("Traceback\\n[rank0]: ValueError: no kernel\\nbye")
    sys.exit(1)
assert os.path.isfile(job["model"] + "/config.json") and sys.path[0] in os.environ["PYTHONPATH"]
times = [{"requests": n, "step_ms": [2.0, 1.0, 4.0], "with_prompts_ms": [3.0]} for n in job["requests"]]
found = {"mode": 2, "cudagraph": "FULL", "graphs": 1, "breaks": 0, "times": times}
json.dump(found, open(job["out"], "w"))
"""
"""An engine that fails as vLLM, and has times with the plug-in."""


ROWS = ("rows", False, True, False), ("rows", False, False, True), ("replay", False, False, True)


def plan(*args: str, gpu: bool = True) -> list[tuple[str, str, bool, bool, bool]]:
    """Return model, kind, vLLM as it is, eager and CUDA graphs of each engine."""
    args_ = run.parse(args)
    return [
        (model, job.what, job.own, "enforce_eager" in job.llm, "compilation_config" in job.llm)
        for model, job in run.measurements(args_.what, args_.models, gpu, args_.plugin)
    ]


def test_rows_and_replays_are_of_all_models_and_the_rest_of_the_last() -> None:
    eager, graphs = (False, True, False), (False, False, True)
    rows = [(model, *how) for model in ("tiny", "real") for how in ROWS]
    times = [("real", "times", vllm_attention, False, True) for vllm_attention in (True, False)]
    preempted = [("every", "preempted", *how) for how in (eager, graphs)]
    assert plan() == [*rows, ("real", "shadow", *eager), *times, *preempted]
    assert plan("--what", "times,rows", "--models", "tiny")[2:] == [("tiny", *time[1:]) for time in times]
    assert plan("--what", "shadow,replay", "--models", "tiny", gpu=False) == [("tiny", "shadow", *eager)]
    both = plan("--what", "times,ranks", "--plugin", "all,1")
    assert both == [*times, times[1], *(("every", "ranks", *how) for how in (eager, graphs) * 2)]


def test_a_cpu_gets_no_settings_of_a_gpu() -> None:
    planned = [job for _, job in run.measurements(run.WHAT, run.MODELS, gpu=False)]
    assert planned and not any({"compilation_config", "kv_cache_dtype", *run.GPU} & set(job.llm) for job in planned)


@pytest.mark.parametrize("args", [["--what", "rows,speed"], ["--models", "pro"], ["--plugin", "1,some"]])
def test_unknown_names_are_errors(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(args)
    assert f"{args[1].split(',')[-1]!r} is none of" in capsys.readouterr().err


def test_a_record_names_its_gpu() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA GH200 480GB": "gh200", "Some GPU": "gpu", "": "cpu"}
    assert {gpu: run.record_name(gpu) for gpu in names} == {gpu: f"vllm_{name}.json" for gpu, name in names.items()}


def test_command_records_engines_that_ran_and_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(run.Measurement, "program", tmp_path / "engine.py")
    monkeypatch.setattr(jobs, "HERE", tmp_path)  # without the kernels for CPUs: their import takes seconds
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    assert run.main(["--what", "times", "--models", "tiny", "--out", str(tmp_path / "out")]) == 1
    record = json.loads((tmp_path / "out" / "vllm_cpu.json").read_text())
    assert record["command"] == "python tests/gpu/vllm/run.py --what times --models tiny" and record["commit"]
    failed, *rows = record["rows"]
    assert failed["engine"] == "vllm" and failed["status"] == "failed: ValueError: no kernel"
    assert [row["requests"] for row in rows] == run.REQUESTS and all(row["date"] and row["commit"] for row in rows)
    lines, shown = figures_vllm.times({"vllm": record["rows"]})
    assert shown == rows
    assert lines[1] == ["1", "1", "vllm", "FULL", "2.00 (3: 1.0 to 4.0)", "3.00 (1 value)"]


def test_rows_of_layers_are_rendered() -> None:
    planned = {job.what: job for _, job in run.measurements(["rows", "shadow"], ["real"], gpu=True)}
    of: dict[str, Any] = {"rows": 1168, "reused": 768, "worst": [0.0123, 0.2], "steps": [3, 1], "sets": 2}
    rows = run.rows_of("real", planned["rows"], of | {"mode": 2, "cudagraph": "FULL"})
    every = run.rows_of("real", planned["rows"], of | {"mode": 0})
    every[0]["engine"] += " all"
    how = ["1", "one graph, CUDA graphs FULL"], ["all", "eager"]
    wanted = [["V4-Flash's dimensions", *columns, "1,168", "768", "1.23e-2, 2.00e-1"] for columns in how]
    assert figures_vllm.rows({"vllm": [*rows, *every]})[0][1:] == wanted
    layer = {"layer": 0, "ratio": 1, "rows": 3967, "mean": 0.001, "prefilled_worst": 0.02, "selected_worst": 0.5}
    layers = run.rows_of("real", planned["shadow"], {"mode": 0, "layers": [layer]})
    assert figures_vllm.shadow({"vllm": layers})[0][1] == ["0", "1", "3,967", "1.00e-3", "2.00e-2", "-", "5.00e-1"]
    assert figures_vllm.rows({"vllm": layers})[1] == []


def test_rows_of_ranks_are_the_worst_of_all(tmp_path: Path) -> None:
    (_, one), (_, job) = run.measurements(["ranks"], ["tiny"], gpu=True, plugins=["all"])
    assert (one.ranks, job.ranks, job.plugin) == (1, 2, "all")
    rank = {"ranks": 2, "heads": 4, "rows": 9, "reused": 3, "steps": [9], "sets": 2, "graphs": [1], "breaks": 0}
    ranks = [rank | {"bits": "a", "worst": [0.1, 0.4]}, rank | {"bits": "a", "worst": [0.2, 0.3]}]
    (row,) = run.rows_of("every", job, {"mode": 2, "ranks": ranks, "beside": {"outputs": 8}})
    assert row["worst"] == [0.2, 0.4] and row["same_bits"] and row["outputs"] == 8 and row["heads"] == 4
    ranks[1]["bits"] = "b"
    assert not run.rows_of("every", job, {"ranks": ranks})[0]["same_bits"]


def test_outputs_are_compared_after_equal_tokens(tmp_path: Path) -> None:
    for name, rows in {"0_ranks": {(1,): [3.0, 4.0], (1, 2): [0.0, 1.0]}, "1_ranks": {(1,): [3.0, 3.0]}}.items():
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        torch.save({tokens: torch.tensor(row) for tokens, row in rows.items()}, folder / "final.pt")
    outputs = run.beside(tmp_path / "1_ranks" / "run", tmp_path / "0_ranks" / "run")
    assert outputs["outputs"] == 1 and outputs["outputs_worst"] == pytest.approx(0.2)


def test_replays_and_preempted_requests_are_rendered() -> None:
    jobs = [job for _, job in run.measurements(["replay", "preempted"], ["tiny"], gpu=True, plugins=["all"])]
    counts = {"steps": 46, "rows": 111, "padded": 21, "sizes": [1, 4], "other_rows": 2, "other_caches": 1}
    rows = run.rows_of("tiny", jobs[0], counts | {"writes": 1473, "strays": 3})
    wanted = ["small", "all", "46", "1, 4", "111", "21", "2", "1", "1,473", "3"]
    assert figures_vllm.replays({"vllm": rows})[0][1] == wanted
    of = {"rows": 879, "reused": 256, "worst": [0.002, 0.004], "steps": [9], "sets": 2, "preemptions": 1, "again": 320}
    of |= {"drift": 0.01, "hits": 0, "worst_after_hits": 0.0, "mode": 2, "cudagraph": "FULL"}
    rows = run.rows_of("every", jobs[2], of | {"beside": {"outputs_worst": 0.03}})
    wanted = ["76 blocks, CUDA graphs FULL", "1", "879", "320", "256", "4.00e-3", "1.00e-2", "3.00e-2"]
    assert figures_vllm.served({"vllm": rows})[0][1] == wanted


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return engine.py, which finds its neighbours as a program does."""
    monkeypatch.syspath_prepend(str(run.ROOT / "tests" / "vllm"))
    monkeypatch.syspath_prepend(str(Path(run.__file__).parent))
    yield importlib.import_module("engine")
    for name in ("engine", "serve"):
        sys.modules.pop(name)


def test_a_step_is_what_one_more_token_takes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def generate(_: Any, prompts: list[list[int]], tokens: int) -> None:
        clock[0] += 0.032 + 0.003 * tokens * len(prompts)

    monkeypatch.setattr(engine.serve, "generate", generate)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock[0])
    times = engine.step_times(None, [[1, 2], [3]], 64)
    assert times["requests"] == 2 and times["prompts"] == [2, 1]
    assert times["step_ms"] == [6.0] * engine.REPEATS
    assert times["with_prompts_ms"] == [6.5] * engine.REPEATS


def test_rows_of_a_layer_are_prefilled_decoded_or_selected(engine: Any) -> None:
    prefill = torch.arange(6), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.1, 0.0])
    decode = torch.tensor([700, 2050, 2051]), torch.tensor([0.4, 0.5, 0.9])
    late = torch.arange(2049, 2055), torch.tensor([0.0, 0.25, 0.6, 0.6, 0.6, 0.6])
    row = engine.summary([prefill, decode, late])
    assert row == {
        "rows": 15,
        "mean": round((0.9 + 1.8 + 2.65) / 15, 5),
        "prefilled_rows": 8,
        "prefilled_worst": 0.3,
        "decoded_rows": 2,
        "decoded_worst": 0.5,
        "selected_rows": 5,
        "selected_worst": 0.9,
    }


def test_attention_of_real_dimensions_is_e4m3_with_scales_of_powers_of_two() -> None:
    config = real_config(hidden_size=256, q_lora_rank=128, num_attention_heads=8, index_n_heads=8, o_groups=2)
    weights = Fp8Weights(config)
    weights.attention("layers.1.attn.", 4)
    names = {name for name, tensor in weights.tensors.items() if tensor.dtype is torch.float8_e4m3fn}
    stems = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")
    assert names == {f"layers.1.attn.{stem}.weight" for stem in stems}
    assert real_config()["quantization_config"]["ignored_layers"][-1] == "model.layers.3.ffn.shared_experts"
    plain = Fp8Weights.__mro__[1](config)
    plain.attention("layers.1.attn.", 4)
    for name in names:
        scale = weights.tensors[f"{name.removesuffix('.weight')}.scale"].float()
        got = weights.tensors[name].float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        want = plain.tensors[name].float()
        assert (got - want).norm() <= 0.04 * want.norm(), name
        largest = weights.tensors[name].float().abs().amax()
        assert 224 <= largest <= 448, name


@pytest.mark.parametrize(
    ("fault", "counts"),
    [
        ("", {"other_rows": 0, "other_caches": 0, "strays": 0}),
        ("row", {"other_rows": 1, "other_caches": 0, "strays": 0}),
        ("padding", {"other_rows": 0, "other_caches": 0, "strays": 0}),
        ("cache", {"other_rows": 0, "other_caches": 1, "strays": 0}),
        ("stray", {"other_rows": 0, "other_caches": 0, "strays": 1}),
    ],
)
def test_replays_are_compared_bit_for_bit(fault: str, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(run.__file__).parent))
    replay = importlib.import_module("replay")
    memory = [torch.zeros(6, 8, dtype=torch.uint8), torch.zeros(6, 4, dtype=torch.uint8)]

    def step(graph: bool) -> torch.Tensor:
        memory[1][3, 2] += 7  # a step on caches that the other step wrote would write a different value
        memory[1][0 if fault == "stray" else 4, 1] = 5
        memory[0][3, 0] = 2 if fault == "cache" and graph else 1
        rows = torch.zeros(4, 2, dtype=torch.bfloat16)
        if graph:
            rows[1 if fault == "row" else 3, 0] = -0.0 if fault in ("row", "padding") else 0.0
        return rows

    counts_of = replay.Replays()
    counts_of.compare(step, memory, torch.tensor([[3, 4, 0], [5, 0, 0]]), live=3)
    assert (counts_of.steps, counts_of.rows, counts_of.padded, counts_of.writes, counts_of.sizes) == (1, 3, 1, 2, {4})
    assert {name: getattr(counts_of, name) for name in counts} == counts
