"""Costs of calls: those of the op at the sizes that the arguments have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import call_costs, costs, layout
from dsv4_compile.bench import gemm
from dsv4_compile.ops._define import OPS
from dsv4_compile.testing.samples import op_samples

KNOWN = sorted(call_costs._SIZES)


def named(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in, as the code that chooses an implementation has them."""
    schema = OPS[op]._schema.arguments
    return {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), args, strict=False))


@pytest.mark.parametrize("op", KNOWN)
def test_calls_have_costs_with_and_without_the_caches_that_they_write(op: str) -> None:
    samples = op_samples(op)
    written = {a.name for a in OPS[op]._schema.arguments if a.alias_info is not None}
    for args in samples:
        arguments = named(op, args)
        cost = call_costs.of(op, arguments)
        assert cost is not None
        assert isinstance(cost.bytes, int) and isinstance(cost.flops, int)
        if any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in args):
            continue
        assert cost.bytes > 0
        assert call_costs.of(op, {name: value for name, value in arguments.items() if name not in written}) == cost


def test_sizes_are_taken_from_where_they_stand() -> None:
    x, weight = torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(1536, 4096, dtype=torch.float8_e4m3fn)
    scale = torch.empty(12, 32)
    got = call_costs.of("fp8_linear", {"x": x, "weight": weight, "weight_scale": scale, "quantize_input": True})
    assert got == costs.of("fp8_linear", T=8, K=4096, N=1536, s=4)
    beside = {"x": x, "weight": weight, "weight_scale": scale, "beside": torch.empty(256, 4096, dtype=torch.bfloat16)}
    both = call_costs.of("fp8_linear", beside)
    assert got is not None and both is not None
    moved = [*beside.values(), torch.empty(8, 1536 + 256)]
    assert both.bytes == sum(tensor.numel() * tensor.element_size() for tensor in moved)
    assert both.flops == got.flops * (1536 + 256) // 1536
    layer = gemm.Layer("fp8_linear", "", 1536, 4096, beside=256)
    assert call_costs.of("fp8_linear", named("fp8_linear", layer.arguments(8, torch.device("cpu"), 0))) == replace(
        layer.cost(8), operands=both.operands
    )
    q, k_cache = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.empty(2, 64 * 584, dtype=torch.uint8)
    arguments = {"q": q, "k_cache": k_cache, "indices": torch.empty(3, 128, dtype=torch.int32)}
    arguments |= {"cache_format": "fp8_ds_mla", "extra_indices": torch.empty(3, 512, dtype=torch.int32)}
    row = layout.FP8_DS_MLA.page_bytes(1)
    assert call_costs.of("sparse_mla_decode", arguments) == costs.of(
        "sparse_mla_decode", T=3, H=64, D=512, K=640, row=row
    )


def test_sums_of_nothing_have_no_cost() -> None:
    x, weight = torch.empty(8, 0, dtype=torch.bfloat16), torch.empty(128, 0, dtype=torch.float8_e4m3fn)
    call = {"x": x, "weight": weight, "weight_scale": torch.empty(1, 0)}
    assert call_costs.of("fp8_linear", call) is None
    assert call_costs.of("grouped_linear", call | {"groups": 1, "weight": x}) is None


def test_a_layer_of_ratio_4_pays_for_both_its_compressors() -> None:
    samples = [named("preprocess_insert", args) for args in op_samples("preprocess_insert")]
    arguments = next(sample for sample in samples if sample["indexer_ape"] is not None)
    absent = ({}, {"indexer_kv_score": None}, {"indexer_kv_score": None, "kv_score": None})
    found = [call_costs.of("preprocess_insert", {**arguments, **without}) for without in absent]
    moved = [cost.bytes for cost in found if cost is not None]
    assert len(moved) == 3
    assert moved == sorted(set(moved), reverse=True)


def test_an_op_without_known_costs_has_none() -> None:
    assert call_costs.of("batch_metadata", {}) is None


def test_lists_of_slots_count_with_their_mean_length_and_gathered_keys_with_all_of_them() -> None:
    q, indices = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.empty(300, dtype=torch.int32)
    arguments = {"q": q, "indices": indices, "cache_format": "fp8_ds_mla", "extra_indices": None}
    row = layout.FP8_DS_MLA.page_bytes(1)
    assert call_costs.of("sparse_mla_decode_ragged", arguments) == costs.of(
        "sparse_mla_decode_ragged", T=3, H=64, D=512, K=100, row=row
    )
    keys = {"q": torch.empty(3, 64, 64, dtype=torch.uint8), "k": torch.empty(900, 64), "cache_format": "indexer_mxfp4"}
    assert call_costs.of("indexer_logits_topk_ragged", keys | {"topk": 512}) == costs.of(
        "indexer_logits_topk_ragged", T=3, H=64, D=128, C=900, L=900, K=512, row=costs.row_bytes("indexer_mxfp4", 128)
    )
