"""Tests of examples/benchmarks/prompt_chunks.py: a tiny model on this CPU, kinds of kernels, floors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_compile.selection import costs
from tests.tools.figures import ROOT

SCRIPT = ROOT / "examples" / "benchmarks" / "prompt_chunks.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT), run_name="script")


def test_a_prompt_runs_in_chunks_and_is_recorded(script: dict[str, Any], tmp_path: Path) -> None:
    options = ["--tiny", "--eager", "--chunks", "32", "--prompts", "64"]
    assert script["main"]([*options, "--seconds", "300", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "prompt_chunks.json").read_text())
    said = "python examples/benchmarks/prompt_chunks.py --chunks 32 --prompts 64 --seconds 300.0 --eager --tiny"
    assert record["command"] == said and record["errors"] == []
    assert [(row["chunk"], row["prompt"], row["steps"]) for row in record["rows"]] == [(32, 64, 2)]
    assert all(row["seconds"] > 0 and row["last_ms"] > 0 and row["commit"] for row in record["rows"])


def test_kernels_have_the_kind_of_their_family(script: dict[str, Any]) -> None:
    kinds = {
        "sparse_mla_prefill_sm90_kernel": "attention", "indexer_score_sm90_kernel": "indexer",
        "select_groups_kernel": "indexer", "gate_up_kernel": "experts", "mhc_boundary_kernel": "hyper-connections",
        "compress_pairs_kernel": "norms, cache rows", "nvjet_tst_128x256": "GEMMs", "Memcpy DtoD": "copies, fills",
        "triton_poi_fused_add_0": "rest",
    }  # fmt: skip
    assert {name: script["kind_of"](name) for name in kinds} == kinds


def test_floors_count_what_each_token_sees(script: dict[str, Any]) -> None:
    config = SimpleNamespace(
        layer_types=script["LAYERS"][:2], index_topk=2, sliding_window=3, num_attention_heads=5, head_dim=7,
        index_n_heads=11, index_head_dim=10**9,
    )  # fmt: skip
    tokens = range(1, 257)
    attended = sum(min(t // 4, 2) + t // 128 + 2 * 3 for t in tokens)
    floors = script["floors_ms"](SimpleNamespace(**{**vars(config), "head_dim": 10**9}), len(tokens))
    assert floors["attention"] == round(4e12 * attended * 5 / costs.H200.flops["bfloat16"], 1) > 0
    assert floors["indexer"] == round(2e12 * sum(t // 4 for t in tokens) * 11 / costs.H200.flops["e4m3"], 1) > 0
