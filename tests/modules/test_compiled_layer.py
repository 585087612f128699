"""Tests that a compiled layer has one graph for every mixed batch, and equals the eager layer bit by bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsv4_compile._compat import counters
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.testing import assert_bitwise
from tests.modules.engine import KINDS, Engine, random_counts

REQUESTS, MAX_SEQ_LEN, LONGEST = 4, 2304, 100
SMALL = DeepseekV4Config(
    hidden_size=96,
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=48,
    o_groups=2,
    o_lora_rank=24,
    sliding_window=32,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=8,
)
# The quantised formats hold vectors of the real dims only.
REAL_ROWS = DeepseekV4Config(
    hidden_size=96, num_heads=2, q_lora_rank=48, o_groups=2, o_lora_rank=24, index_n_heads=4, index_topk=8
)
CASES: dict[str, tuple[DeepseekV4Config, dict[str, Any]]] = {
    "float32": (SMALL, {"dtype": torch.float32}),
    "fp8_ds_mla": (REAL_ROWS, {"kv_cache_dtype": "fp8_ds_mla"}),
    "fp8_ds_mla-mxfp4-hadamard": (
        REAL_ROWS,
        {"kv_cache_dtype": "fp8_ds_mla", "indexer_cache_dtype": "mxfp4", "hadamard": True},
    ),
    "fp8-cache-and-weights": (SMALL, {"kv_cache_dtype": "fp8", "indexer_cache_dtype": "bfloat16", "fp8": True}),
}


def random_layer(config: DeepseekV4Config, kind: str, **kwargs: Any) -> DeepseekV4Attention:
    config = config.with_layers({"swa": 1, "csa": 4, "hca": 128}[kind])
    layer = DeepseekV4Attention(config, 0, **{"max_seq_len": MAX_SEQ_LEN} | kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dtype is torch.float8_e8m0fnu:
                parameter.fill_(2.0**-4)
            else:
                gain = 1.0 if parameter.dtype is torch.float8_e4m3fn else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape) * gain)
    return layer


# Every kind in float32, and in the cache and weight formats that give it a different graph.
COMPILED = [
    *(("float32", kind) for kind in KINDS),
    *(("fp8_ds_mla", "csa"), ("fp8_ds_mla", "hca"), ("fp8_ds_mla-mxfp4-hadamard", "csa")),
    *(("fp8-cache-and-weights", "csa"), ("fp8-cache-and-weights", "swa")),
]


@pytest.mark.parametrize(("case", "kind"), COMPILED)
def test_one_graph_serves_every_mixed_batch(case: str, kind: str, seed: int) -> None:
    """Two calls with different numbers of tokens warm up; after them a recompile is an error."""
    config, kwargs = CASES[case]
    layer = random_layer(config, kind, **kwargs)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    counters.clear()
    eager, engine = (
        Engine(layer, REQUESTS, MAX_SEQ_LEN, call=call, max_step_tokens=LONGEST) for call in (layer, compiled)
    )
    rng = random.Random(seed)

    def step(counts: list[int], padding: int) -> None:
        chunks = [torch.randn(n, config.hidden_size).to(layer.q_norm.weight.dtype) for n in counts]
        for got, expected in zip(engine.step(chunks, padding), eager.step(chunks, padding), strict=True):
            assert_bitwise(got, expected)

    step([LONGEST, 0, 3, 1], padding=2)
    step([60, 7, 1, 0], padding=0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(10):
            step(random_counts(rng, REQUESTS, LONGEST), padding=rng.choice((0, 0, 3)))
    for name, tensor in engine.paged.layers[0].tensors().items():
        assert_bitwise(tensor, eager.paged.layers[0].tensors()[name], label=name)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
