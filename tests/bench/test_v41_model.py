"""Tests of the benchmark of a whole DeepSeek-V4.1, on a tiny one, and of its tables."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_compile.bench.parts import Parts
from dsv4_compile.bench.v41_model import (
    experts_that_fit,
    meta_model,
    prompt_flops,
    random_model,
    request_bytes,
    smaller,
    weight_bytes,
)
from dsv4_compile.models.v41 import V41Config
from dsv4_compile.models.v41.tiny import tiny_config, tiny_model
from dsv4_compile.runtime import host_memory
from tests.tools import figures, figures_v41

SCRIPT = figures.ROOT / "examples" / "benchmarks" / "v41_model.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module that runs each step few times."""
    spec = importlib.util.spec_from_file_location("v41_model_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"STEPS": 2, "REPEATS": 1, "PROMPT": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


def run(script: ModuleType, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the record of a run on a tiny model."""
    status = script.main(["--tiny", "--device", "cpu", "--backends", "plain", "--out", str(folder), *options])
    return status, json.loads((folder / "v41_model.json").read_text())


def test_a_tiny_model_is_measured_and_its_tables_are_rendered(script: ModuleType, tmp_path: Path) -> None:
    status, record = run(script, tmp_path, "--batches", "1", "3", "--contexts", "40", "--prompts", "24")
    assert status == 0 and record["errors"] == []
    assert [row["what"] for row in record["rows"]] == ["step"] * 2 + ["generate"] * 2 + ["kernels"] * 2 + ["prompt"] * 2
    assert all(row["date"] and row["commit"] for row in record["rows"])
    assert record["layers"] == 8 and record["weights_gb"] >= 0 and "--tiny" in record["command"]
    one, three = (row for row in record["rows"] if row["what"] == "step")
    assert one["floor_ms"] < three["floor_ms"] and one["ms"] > 0
    touched = [row["experts_a_layer"] for row in record["rows"] if row["what"] == "kernels"]
    assert touched[0] == 2 and 2 < touched[1] <= 6
    rows = {"v41_model": record["rows"]}
    lines, shown = figures_v41.steps(rows)
    assert lines[0] == ["context", "batch", "plain, ms", "floor, ms", "GB read"] and [len(shown), len(lines)] == [2, 3]
    assert [line[:3] for line in figures_v41.prompts(rows)[0][1:]] == [["plain", "24", "full"], ["plain", "24", "tail"]]


def test_tables_in_host_memory_are_locked_before_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[torch.Tensor] = []

    def on_gpu(table: torch.Tensor, _: torch.device) -> torch.Tensor:
        locked.append(table)
        return table.view(torch.uint8).zero_().view(table.dtype)

    monkeypatch.setattr(host_memory, "on_gpu", on_gpu)
    model = random_model(tiny_config(), torch.device("cpu"), host=True)
    assert len(locked) == 4 and all(table.view(torch.uint8).any() for table in locked)
    assert [layer.engram.ahead for layer in model._stack() if layer.has_engram] == [True, True]


def test_a_part_that_fails_leaves_the_others_running(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(script.Bench, "compiled_steps", broken)
    monkeypatch.setattr(script.v41, "prefill", lambda *_, **__: None)
    status, record = run(script, tmp_path, "--batches", "1", "--contexts", "40", "--prompts", "8")
    assert status == 1
    assert record["errors"] == [{"part": "steps at 40 tokens, plain", "error": "RuntimeError: no kernel"}]
    assert [row["what"] for row in record["rows"]] == ["prompt"] * 2


def test_parts_end_at_the_deadline(tmp_path: Path) -> None:
    said: list[str] = []
    parts = Parts({"scenario": "parts", "commit": "", "errors": [], "rows": []}, tmp_path, 1.1, said.append)
    begin = time.monotonic()
    with parts.part("outer"):
        with parts.part("inner"):
            pass
        time.sleep(30)
    with parts.part("late"):
        time.sleep(30)
    assert time.monotonic() - begin < 10
    errors = json.loads((tmp_path / "parts.json").read_text())["errors"]
    assert [error["part"] for error in errors] == ["outer", "late"] and all(
        "TimeoutError" in error["error"] for error in errors
    )
    assert any("late" in line for line in said)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sparse_mla_mixed_kernel", "attention"),
        ("index_score_kernel", "selection"),
        ("split_gate_up_kernel", "experts"),
        ("moe_route_kernel", "experts"),
        ("engram_embed_kernel", "engram"),
        ("triton_poi_fused_mhc_post_3", "hyper-connections"),
        ("rope_quantize_insert_kernel", "cache rows"),
        ("gemm_sm90_small_kernel", "GEMMs"),
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT", "GEMMs"),
        ("Memcpy DtoD (Device -> Device)", "copies, fills"),
        ("void at::native::index_elementwise_kernel<128, 4>", "rest"),
    ],
)
def test_kernels_have_a_kind(script: ModuleType, kernel: str, kind: str) -> None:
    assert script.kind_of(kernel) == kind


def test_kinds_of_kernels_are_a_table() -> None:
    row = {"what": "kernels", "backend": "plain", "context": 64, "batch": 1, "launches": 3, "kernels_ms": 0.01}
    rows = {"v41_model": [row | {"us_by_kind": {"GEMMs": 8.0, "rest": 2.0}}, {"what": "kernels", "backend": "dsv4"}]}
    lines, shown = figures_v41.kinds(rows)
    assert lines[1] == ["plain", "64", "1", "3", "0.01", "0.00", "0.01"] and len(shown) == 1


def test_bytes_of_a_step_are_those_of_the_specification() -> None:
    """It counts e4m3 for wo_a, which is bfloat16 here; caches without rings of more than the window."""
    config = smaller(V41Config(), 384, 97)
    model = meta_model(config)
    wo_a = sum(parameter.numel() for name, parameter in model.named_parameters() if "wo_a" in name)
    read = [weight_bytes(model, batch) - wo_a for batch in (1, 8, 32, 128)]
    assert [round(size / 1e9, 1) for size in read] == [13.0, 42.7, 122.8, 258.8]
    caches = [round(request_bytes(config, context) / 1e6, 1) for context in (1 << 17, 1 << 20)]
    assert caches == [35.0, 191.0]


def test_a_device_without_a_limit_takes_all_experts() -> None:
    config = tiny_model().config
    assert experts_that_fit(config, torch.device("cpu"), 0.0, 61) == config.num_experts


def test_a_prompt_token_has_half_of_the_flops_of_a_decoded_one() -> None:
    """The model's report counts 16B active parameters a decoded token, and 8B a token of a prompt."""
    config = V41Config(sliding_window=1, index_topk=1, index_n_heads=1)
    active = [prompt_flops(config, 1 << 17, mode) / (2 << 17) / 1e9 for mode in ("full", "replay")]
    assert 15 < active[0] < 16 and 7.5 < active[1] < 8.5


def test_the_page_says_what_the_tail_of_a_prompt_saves() -> None:
    config = V41Config()
    page = (figures.ROOT / "dsv4_compile" / "docs" / "v41.md").read_text()
    for tokens in (8192, 32768, 131072):
        share = prompt_flops(config, tokens, "tail") / prompt_flops(config, tokens, "full")
        assert f"| {tokens:,} | {share:.0%} |" in page
    assert prompt_flops(config, 2414, "tail") == prompt_flops(config, 2414, "full")
    assert prompt_flops(config, 2415, "tail") < prompt_flops(config, 2415, "full")


def test_random_prompts_hold_no_image_token(script: ModuleType) -> None:
    config = SimpleNamespace(vocab_size=4, image_token_id=2)
    bench = SimpleNamespace(model=SimpleNamespace(config=config), device=torch.device("cpu"))
    assert set(script.Bench.ids(bench, 256).tolist()) == {0, 1, 3}


def test_errors_of_parts_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    record: dict[str, Any] = {"scenario": "parts", "commit": "", "errors": [], "rows": []}
    with Parts(record, tmp_path, 60.0, lambda line: None).part("files"):
        raise ValueError(f"{figures.ROOT}/dsv4_compile/layout.py failed")
    assert record["errors"] == [{"part": "files", "error": "ValueError: dsv4_compile/layout.py failed"}]
