"""Tests of the launches of a compiled decode step of each kind of layer: GEMMs and the kernels between them.

Attention is not split here. On a GPU with many more SMs than tokens it is, and its combine kernel is one launch more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.selected import values_of

ROOT = Path(__file__).resolve().parents[2]

CAST = ["triton_poi_fused__to_copy_0", "triton_poi_fused__to_copy_1"]
"""Casts for a float32 result of bfloat16 operands. On CUDA torch.mm takes `out_dtype` instead."""
CAST_WITHIN = ["_to_copy", "_to_copy"]
"""Casts for a float32 result inside the op that has both weights of hidden."""
COUNTERS = ["zeros"]
"""Semaphores of preprocess_insert; on CUDA they come from a pool and are zero already."""
NOT_ON_CUDA = {*CAST, *CAST_WITHIN, *COUNTERS}

GEMM, FP8_GEMM = ["mm"], ["gemm_kernel"]
INSERT, ATTENTION = ["preprocess_insert_kernel"], ["sparse_mla_decode_kernel"]
INDEXER = ["indexer_q_rope_quant_kernel", "indexer_score_kernel", "select_topk_kernel"]
GROUPED = ["gemm_kernel"]

EXPECTED = {
    "swa bf16": GEMM + INSERT + GEMM + ATTENTION + GROUPED + GEMM,
    "hca bf16": CAST + GEMM + COUNTERS + INSERT + GEMM + ATTENTION + GROUPED + GEMM,
    "csa bf16": CAST + GEMM + INSERT + GEMM + INDEXER + ATTENTION + GROUPED + GEMM,
    "swa fp8": FP8_GEMM + INSERT + FP8_GEMM + ATTENTION + GROUPED + FP8_GEMM,
    # The projections of compressors and of the indexer's weights are bfloat16, a separate GEMM.
    "hca fp8": FP8_GEMM + CAST_WITHIN + GEMM + COUNTERS + INSERT + FP8_GEMM + ATTENTION + GROUPED + FP8_GEMM,
    "csa fp8": FP8_GEMM + CAST_WITHIN + GEMM + INSERT + FP8_GEMM + INDEXER + ATTENTION + GROUPED + FP8_GEMM,
}
BUDGET = {"swa bf16": 6, "hca bf16": 6, "csa bf16": 9, "swa fp8": 6, "hca fp8": 7, "csa fp8": 10}
"""Graph nodes of a decode step on CUDA."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Launches of the layers for which this run has tests."""
    layers = values_of("layer", request)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.modules.launches", *layers]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reports: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert set(reports) == set(layers)
    return reports


@pytest.mark.parametrize("layer", EXPECTED)
def test_a_decode_step_has_exactly_these_launches(found: dict[str, list[str]], layer: str) -> None:
    assert found[layer] == EXPECTED[layer]


@pytest.mark.parametrize("layer", EXPECTED)
def test_a_decode_step_stays_within_its_budget_of_graph_nodes(found: dict[str, list[str]], layer: str) -> None:
    assert len([launch for launch in found[layer] if launch not in NOT_ON_CUDA]) == BUDGET[layer]
