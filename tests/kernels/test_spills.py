"""Kernels of few tokens keep all their values in registers, in code compiled ahead of time for Hopper."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4_compile.bench import gemm, indexer, preprocess, preprocess_insert, sparse_mla_decode
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as small
from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.host import gpu
from dsv4_compile.kernels.host import pdl as early
from dsv4_compile.kernels.linear import fp8_linear
from dsv4_compile.kernels.linear import gemm as grouped_matmul
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from tests.kernels.gpus import GPUS
from tests.tools.compiled_facts import compiled_for

FLASH = DeepseekV4Config.flash()
SIZES: dict[ModuleType, dict[str, Any]] = {
    preprocess: {"configs": (FLASH,)},
    gemm: {"models": {"Flash": FLASH}},
    indexer: {"context": 2048},
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (early, gpu, fp8_linear, grouped_matmul):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS["sm_90"][0])


@pytest.mark.parametrize(
    ("scenario", "only", "tokens"),
    [
        (preprocess, {"op": "fused_q_kv_rmsnorm"}, (8,)),
        (preprocess_insert, {"kind": "swa", "latent": "1024"}, (1, 8, 128)),
        (preprocess, {"op": "q_norm_rope"}, (1, 32, 128)),
        (preprocess, {"op": "kv_rope_insert"}, (1, 32)),
        (preprocess, {"op": "inv_rope"}, (1, 32, 128)),
        (preprocess, {"op": "inv_rope_fp8_quant"}, (1, 32, 128)),
        (indexer, {"op": "save_partial_states", "layer": "CSA"}, (8,)),
        (indexer, {"op": "compress_norm_rope_insert", "layer": "CSA"}, (8,)),
        (indexer, {"op": "compress_norm_rope_insert", "layer": "indexer"}, (8,)),
        (indexer, {"op": "indexer_q_rope_quant"}, (8, 128)),
        (indexer, {"op": "global_topk", "topk": "512"}, (8,)),
        (gemm, {"op": "fp8_linear", "layer": "wq_a + wkv"}, (8,)),
        (gemm, {"op": "fp8_linear", "layer": "wq_a + wkv beside HCA"}, (8, 16)),
        (gemm, {"op": "fp8_linear", "layer": "wo_b"}, (8,)),
    ],
)
def test_ops_of_a_decode_step_do_not_spill(scenario: ModuleType, only: dict[str, str], tokens: tuple[int, ...]) -> None:
    wanted = {name: {value} for name, value in only.items()}
    for count in tokens:
        (problem,) = scenario.problems(torch.device("cpu"), wanted, tokens=(count,), **SIZES.get(scenario, {}))
        with compiled_for("sm_90") as compiled:
            launcher(problem.op)(*problem.make(0))
        assert [kernel.resources()["STACK"] for kernel in compiled] == [0]


@pytest.mark.parametrize("cache_format", ["indexer_fp8", "indexer_mxfp4", "plain"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_queries_of_an_indexer_do_not_spill(hadamard: bool, cache_format: str) -> None:
    q, weights = torch.empty(8, 64, 128, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16)
    with compiled_for("sm_90") as compiled:
        launcher("indexer_q_rope_quant")(q, torch.arange(8), torch.empty(4096, 64), weights, cache_format, hadamard)
    assert compiled[0].resources()["STACK"] == 0


@pytest.mark.parametrize("tiling", [small.NARROW, *small.ONE_BLOCK])
@pytest.mark.parametrize("fused", ["none", "quant"])
def test_keys_of_few_tokens_do_not_spill(fused: str, tiling: small.Tiling) -> None:
    args = sparse_mla_decode.fused_arguments(fused, 8, 64, torch.device("cpu"), 0)
    call = decode_call((DecodeArguments if fused == "none" else DecodeQuantArguments)(*args))
    with compiled_for("sm_90") as compiled:
        small.launch(call, GPUS["sm_90"][0], 10, tiling=tiling)
    assert compiled[0].resources()["STACK"] == 0
