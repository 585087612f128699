"""Unsupported calls of the fused preprocessing kernel, and its compilation for every GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.kernels.preprocess import preprocess_insert as kernel
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.preprocess.preprocess_insert import PreprocessArguments
from tests.kernels.gpus import GPUS, begins_early, sees, shared_out
from tests.ops.preprocess.preprocess_layer import Layer
from tests.support import fake_triton
from tests.tools.compiled_facts import compiled_for


def why_unsupported(**changes: Any) -> str:
    model = Layer(4)
    arguments = {**model.arguments([(0, 125)], model.projection(1)), **changes}
    return kernel.why_unsupported_preprocess_insert(PreprocessArguments(**arguments))


def test_unsupported_calls_have_a_reason() -> None:
    assert why_unsupported() == ""
    assert "latents have 5000" in why_unsupported(qr=torch.empty(1, 5000))
    assert "keys have 24 dims" in why_unsupported(kv=torch.empty(1, 24))
    assert "entries have 24 dims" in why_unsupported(norm_weight=torch.empty(24))
    assert "indexer keys have 24 dims" in why_unsupported(indexer_norm_weight=torch.empty(24))
    assert "Hadamard transform has 8 dims" in why_unsupported(indexer_norm_weight=torch.empty(8), hadamard=True)


def model_arguments(ratio: int, tokens: int, **indexer: Any) -> dict[str, Any]:
    """A step of V4-Flash: bfloat16 weights, one float32 projection."""
    dims = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "key_dim": 128, "dtype": torch.bfloat16}
    model = Layer(ratio, **dims, **indexer, max_len=256, latent=1024)
    return model.arguments([(0, p) for p in range(tokens)], model.projection(tokens))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    variants: list[dict[str, Any]] = [{"ratio": 0, "tokens": 3}, {"ratio": 128, "tokens": 3}]
    variants += [{"ratio": 4, "tokens": 3, "key_fmt": "indexer_mxfp4", "hadamard": True}]
    layers = shared_out(variants)[target]
    with compiled_for(target) as compiled:
        for options in layers:
            launcher("preprocess_insert")(**model_arguments(**options))
    assert len(compiled) == len(layers)
    assert all(binary.assembled for binary in compiled)
    most = {0: "none", 4: kernel.REGISTERS, 128: kernel.POOL_REGISTERS}
    wanted = [f".maxnreg {most[of['ratio']]}" for of in layers]
    limits = [limit in binary.asm.get("ptx", "") for limit, binary in zip(wanted, compiled, strict=True)]
    assert limits == [GPUS[target][0].backend == "cuda" and bool(options["ratio"]) for options in layers]
    assert all(begins_early(binary) == early for binary in compiled)
