"""Fusion in the three kinds of layers, as modules or op by op; results equal those of the unfused graph."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.lowering import registry
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.options import FUSE_PASSES
from dsv4_compile.passes import fusion
from dsv4_compile.selection import proven
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close
from tests.backend.functional import Fused, fused
from tests.modules.engine import KINDS, Engine
from tests.modules.test_compiled_layer import CASES, MAX_SEQ_LEN, random_layer

INDEXER = {"indexer_q_rope_quant": 1, "indexer_topk_slots": 1}
FUSED = ("preprocess_insert", "sparse_mla_decode", "grouped_linear")
GEMMS = ("fp8_grouped_einsum_quant", "fp8_grouped_einsum", "fp8_grouped_einsum")
FUSED_FP8 = ("preprocess_insert_quant", "sparse_mla_decode_quant", *GEMMS)
FORMATS = ("float32", "fp8_ds_mla-mxfp4-hadamard", "fp8-cache-and-weights")
STEPS = [[10, 0, 3], [1, 1, 140]]
NEIGHBOUR = Tolerance(abs=2e-4, rel=1.01 / 128, cosine=1e-6)
"""Tolerance for e4m3 weights: the last GEMM becomes a batch of one, which a library may sum in a different order."""


def step_through(layer: DeepseekV4Attention, call: Any, check: Any = assert_bitwise, steps: Any = STEPS) -> None:
    """Compare outputs and cache bytes of steps through `call` with those of the layer itself."""
    expected, got = (Engine(layer, 3, MAX_SEQ_LEN, call=run, max_step_tokens=150) for run in (layer, call))
    for counts in steps:
        chunks = [torch.randn(n, layer.config.hidden_size).to(layer.q_norm.weight.dtype) for n in counts]
        for a, b in zip(got.step(chunks, padding=2), expected.step(chunks, padding=2), strict=True):
            check(a, b)
    for name, tensor in got.paged.layers[0].tensors().items():
        assert_bitwise(tensor, expected.paged.layers[0].tensors()[name], label=name)


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("csa", case) for case in FORMATS), ("swa", FORMATS[2]), ("hca", FORMATS[1]), ("hca", FORMATS[0])],
)
def test_a_layer_has_one_op_between_its_projections_and_caches_and_one_for_attention(kind: str, case: str) -> None:
    config, kwargs = CASES[case]
    fp8 = "fp8" in kwargs
    # As in the models, a group of the output projection is a multiple of a scale's 128 rows.
    config = dataclasses.replace(config, o_lora_rank=128) if fp8 else config
    layer = random_layer(config, kind, **kwargs)
    # In float32 for one number of tokens, then for any; other formats for any at once.
    result = fused(layer, dynamic=None if case == "float32" else True)
    with torch._dynamo.config.patch(error_on_recompile=case != "float32"):
        step_through(layer, result.call, partial(assert_close, tolerance=NEIGHBOUR) if fp8 else assert_bitwise)
    expected = Counter([*(FUSED_FP8 if fp8 else FUSED), *(INDEXER if kind == "csa" else {})])
    del result.ops["fp8_linear"]
    assert result.ops == expected
    assert [fusion.fused for fusion in result.fusions] == [True] * (2 + (kind == "csa") + 2 * fp8)


# The CSA layer has every pass. Each of the others goes without half of those that have something to fuse in it.
PASSES = [off for off in FUSE_PASSES if off not in ("fuse_indexer", "fuse_streams")]


@pytest.mark.parametrize(
    ("kind", "off"),
    [*(("csa", off) for off in FUSE_PASSES), *zip(itertools.cycle(("swa", "hca")), PASSES, strict=False)],
)
def test_every_pass_works_without_each_other(kind: str, off: str) -> None:
    config, kwargs = CASES["fp8-cache-and-weights"]
    layer = random_layer(dataclasses.replace(config, o_lora_rank=128), kind, **kwargs)
    # The CSA layer has every pass: two steps by one graph of any number of tokens. One step of the others will do.
    result = fused(layer, {"dsv4.fuse": "on", f"dsv4.fuse.{off}": "off"}, dynamic=True if kind == "csa" else None)
    steps = STEPS if kind == "csa" else STEPS[1:]
    with torch._dynamo.config.patch(error_on_recompile=True):
        step_through(layer, result.call, partial(assert_close, tolerance=NEIGHBOUR), steps)
    assert off not in {fusion.by for fusion in result.fusions} != set()
    assert all(fusion.fused for fusion in result.fusions)


@pytest.mark.parametrize("kind", KINDS)
def test_off_and_auto_on_a_cpu_fuse_nothing(kind: str) -> None:
    config, kwargs = CASES["float32"]
    layer = random_layer(config, kind, **kwargs)
    counts = []
    for value in ("off", "auto"):
        result = fused(layer, {"dsv4.fuse": value})
        Engine(layer, 1, MAX_SEQ_LEN, call=result.call, max_step_tokens=150).step([torch.randn(9, config.hidden_size)])
        counts.append(result.ops)
        groups = 0 if value == "off" else 3 if kind == "csa" else 2
        expected = ["no Inductor lowering; its kernel runs on GPUs"] * groups
        assert [reason.partition("reference: ")[2] for reason in result.reasons] == expected
    assert counts[0] == counts[1]
    assert {"fused_q_kv_rmsnorm", "q_norm_rope_kv_insert", "sparse_mla_decode", "inv_rope"} <= set(counts[0])


def separate(layer: DeepseekV4Attention) -> Any:
    """Return the forward of `layer` written with one call for each op."""

    def run(hidden: Tensor, metadata: Any, cache: Any) -> Tensor:
        ops, table, heads = torch.ops.dsv4, layer.cos_sin, layer.config.num_heads
        qr, kv = ops.fused_q_kv_rmsnorm(
            layer.wq_a(hidden), layer.wkv(hidden), layer.q_norm.weight, layer.kv_norm.weight, layer.eps
        )
        q = layer.wq_b(qr).view(hidden.shape[0], heads, -1)
        q = ops.q_norm_rope(q, metadata.positions, table, layer.eps)
        window = metadata.window
        ops.kv_rope_insert(kv, cache.window, window.slot_mapping, metadata.positions, table, 64, "plain")
        compressor, md, source = layer.compressor, metadata.sources[128], cache.sources[0]
        score = torch.cat((compressor.wkv(hidden), compressor.wgate(hidden)), dim=-1)
        ops.save_partial_states(score, compressor.ape, source.states, md.state_slot_mapping, metadata.positions, 8)
        ops.compress_norm_rope_insert(
            source.states,
            md.state_slot_mapping,
            md.state_block_table,
            metadata.token_to_req,
            metadata.positions,
            md.slot_mapping,
            compressor.norm.weight,
            table,
            source.entries,
            layer.eps,
            128,
            8,
            2,
            "plain",
        )
        out, _ = ops.sparse_mla_decode(
            q,
            cache.window,
            window.indices,
            window.lens,
            64,
            "plain",
            layer.scale,
            layer.attn_sink,
            source.entries,
            md.indices,
            md.lens,
            2,
        )
        return layer._project_output(out, metadata.positions)

    return run


def test_a_layer_of_separate_calls_becomes_the_same_graph() -> None:
    config, kwargs = CASES["float32"]
    layer = random_layer(config, "hca", **kwargs)
    result = fused(separate(layer))
    expected, got = (Engine(layer, 2, MAX_SEQ_LEN, call=run, max_step_tokens=150) for run in (layer, result.call))
    for counts in [[130, 3], [1, 1]]:
        chunks = [torch.randn(n, config.hidden_size) for n in counts]
        for a, b in zip(got.step(chunks), expected.step(chunks), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert result.ops == dict.fromkeys(FUSED, 1)


@torch.no_grad()
def test_compiled_code_writes_every_cache_in_place_and_the_report_lists_the_fused_ops() -> None:
    config, kwargs = CASES["float32"]
    layer = random_layer(config, "csa", **kwargs)
    expected, got = (Engine(layer, 2, MAX_SEQ_LEN, max_step_tokens=150) for _ in range(2))
    hidden = [torch.randn(9, config.hidden_size), torch.randn(4, config.hidden_size)]
    expected.step(hidden)
    got.lengths = [9, 4]
    arguments = torch.cat(hidden), got.metadata([9, 4], 13), got.paged.layers[0]
    # Inductor calls PyTorch in place of C++ that it would compile; the code around the calls is generated.
    options = {"dsv4.fuse": "on", "fallback_by_default": True}
    report = dsv4_compile.explain(layer, *arguments, options=options)
    assert report.ok
    assert not report.missed_reinplace
    for name, tensor in got.paged.layers[0].tensors().items():
        assert_bitwise(tensor, expected.paged.layers[0].tensors()[name], label=name)
    assert [(row.by, row.into, row.fused, row.count) for row in report.fusions] == [
        ("fuse_preprocess", "preprocess_insert", True, 1),
        ("fuse_indexer", "indexer_topk_slots", True, 1),
        ("fuse_attention", "sparse_mla_decode", True, 1),
    ]
    assert "1 group fused into preprocess_insert" in str(report)


def test_two_layers_in_one_graph_are_fused_separately() -> None:
    config, kwargs = CASES["float32"]
    layers = [random_layer(config, kind, **kwargs) for kind in ("swa", "swa")]

    def run(hidden: Tensor, metadata: Any, cache: Any) -> Tensor:
        # Both share a cache: the second layer overwrites the entries that the first has read.
        hidden = hidden + layers[0](hidden, metadata, cache)
        return hidden + layers[1](hidden, metadata, cache)

    result: Fused = fused(run)
    expected, got = (Engine(layers[0], 2, MAX_SEQ_LEN, call=call) for call in (run, result.call))
    chunks = [torch.randn(7, config.hidden_size), torch.randn(2, config.hidden_size)]
    for a, b in zip(got.step(chunks), expected.step(chunks), strict=True):
        assert_bitwise(a, b)
    assert result.ops == dict.fromkeys(FUSED, 2)


@torch.inference_mode()
@pytest.mark.parametrize("fuse", ["on", "auto"])
def test_every_layer_of_a_model_is_recorded_once(fuse: str) -> None:
    config, kwargs = CASES["float32"]
    layers = [random_layer(config, "csa", **kwargs) for _ in range(2)]
    engine = Engine(layers[0], 2, 256)
    engine.lengths = [9, 4]
    metadata = engine.metadata([9, 4], 13)

    def run(hidden: Tensor, caches: list[Any]) -> Tensor:
        for layer, cache in zip(layers, caches, strict=True):
            hidden = hidden + layer(hidden, metadata, cache)
        return hidden

    hidden = torch.randn(13, config.hidden_size)
    first, second = ([Engine(layers[0], 2, 256).paged.layers[0] for _ in layers] for _ in range(2))
    result = fused(run, {"dsv4.fuse": fuse})
    assert_bitwise(result.call(hidden, first), run(hidden, second))
    for a, b in zip(first, second, strict=True):
        for name, tensor in a.tensors().items():
            assert_bitwise(tensor, b.tensors()[name], label=name)
    assert Counter((fusion.by, fusion.fused, len(fusion.ops)) for fusion in result.fusions) == {
        ("fuse_preprocess", fuse == "on", 6): 2,
        ("fuse_indexer", fuse == "on", 2): 2,
        ("fuse_attention", fuse == "on", 3): 2,
    }


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose implementations as on an H200; the references run."""
    gpu = {"device": torch.device("cuda"), "codegen": "triton", "architecture": "cuda sm_90"}
    describe = fusion.describe
    monkeypatch.setattr(fusion, "describe", lambda *args: dataclasses.replace(describe(*args), **gpu))


def one_step(kind: str) -> Fused:
    config, kwargs = CASES["fp8_ds_mla"]
    layer = random_layer(config, kind, single_gemm=True, **kwargs)
    result = fused(layer, {})
    Engine(layer, 1, 256, call=result.call).step([torch.randn(9, config.hidden_size).bfloat16()])
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_auto_fuses_every_layer_if_the_kernels_are_proven(on_gpu: None, kind: str) -> None:
    with proven.trust():
        result = one_step(kind)
    groups = 4 if kind == "csa" else 2
    chosen = [re.search(r" \((triton|ir): ", str(fusion)) is not None for fusion in result.fusions]
    assert chosen == [True] * groups
    assert set(result.ops) - set(INDEXER) == set(FUSED)


@pytest.mark.parametrize(
    ("tested", "reasons"),
    [
        ({"ir q_norm_rope_kv_insert"}, ["preprocess_insert would run its reference", "sparse_mla_decode would run"]),
        (
            {"ir q_norm_rope_kv_insert", "triton preprocess_insert", "triton sparse_mla_decode"},
            [
                "q_norm_rope, the rest of q_norm_rope_kv_insert, would",
                "kv_rope_insert, the rest of q_norm_rope_kv_insert, would",
            ],
        ),
    ],
    ids=["fused-op", "remainder"],
)
def test_auto_keeps_proven_implementations(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, tested: set[str], reasons: list[str]
) -> None:
    monkeypatch.setattr(registry, "is_proven", lambda impl, op, architecture: f"{impl} {op}" in tested)
    monkeypatch.setattr(proven, "_rows", dict)
    monkeypatch.setattr(registry, "why_unproven", proven._why_unproven.__wrapped__)
    result = one_step("swa")
    assert result.ops["q_norm_rope_kv_insert"] == result.ops["sparse_mla_decode"] == 1
    for reason, start in zip(result.reasons, reasons, strict=True):
        assert reason.startswith(start)
        assert "has not been tested on cuda sm_90 yet" in reason
