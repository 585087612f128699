"""Costs of calls: those of the op at the sizes that the arguments have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.bench import gemm
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.selection import call_costs, costs
from dsv4_compile.testing.samples import op_samples

KNOWN = sorted(call_costs.names())


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


def test_a_router_reads_its_gate_and_a_bias_or_a_row_of_a_table_for_each_token() -> None:
    for args in op_samples("moe_route"):
        arguments = named("moe_route", args)
        table = arguments["tid2eid"]
        rows = 0 if table is None else len(args[0]) * table.shape[1] * table.element_size()
        names = [name for name in ("x", "gate", "bias", "token_ids") if arguments[name] is not None]
        cost = call_costs.of("moe_route", arguments)
        assert cost is not None and cost.bytes == tensors_moved("moe_route", args, *names) + rows


def test_experts_read_the_weights_of_as_many_as_tokens_may_take() -> None:
    shared = ("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale")
    for args in op_samples("moe_experts"):
        arguments = named("moe_experts", args)
        names = [name for name in ("x", "ids", "weights", *shared) if arguments[name] is not None]
        weights = [arguments[name] for name in ("w13", "w2", "w13_scale", "w2_scale") if arguments[name] is not None]
        taken = min(len(weights[0]), arguments["ids"].numel())
        expert_bytes = sum(weight[0].numel() * weight.element_size() for weight in weights)
        cost = call_costs.of("moe_experts", arguments)
        assert cost is not None and cost.bytes == tensors_moved("moe_experts", args, *names) + taken * expert_bytes
        inner = arguments["ids"].shape[1] * weights[0].shape[1]
        inner += 0 if arguments["shared_w13"] is None else arguments["shared_w13"].shape[0]
        assert cost.flops == 3 * args[0].numel() * inner


def test_sums_of_nothing_have_no_cost() -> None:
    x, weight = torch.empty(8, 0, dtype=torch.bfloat16), torch.empty(128, 0, dtype=torch.float8_e4m3fn)
    call = {"x": x, "weight": weight, "weight_scale": torch.empty(1, 0)}
    assert call_costs.of("fp8_linear", call) is None
    assert call_costs.of("grouped_linear", call | {"groups": 1, "weight": x}) is None


def test_a_layer_of_ratio_4_pays_for_both_its_compressors() -> None:
    samples = [named("preprocess_insert", args) for args in op_samples("preprocess_insert")]
    arguments = next(sample for sample in samples if sample["indexer_ape"] is not None)
    absent = ({}, {"indexer_kv_score": None}, {"indexer_kv_score": None, "kv_score": None})
    costs = [call_costs.of("preprocess_insert", {**arguments, **without}) for without in absent]
    moved = [cost.bytes for cost in costs if cost is not None]
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
    row = costs.row_bytes("indexer_mxfp4", 128)
    of = costs.of("indexer_logits_topk_ragged", T=3, H=64, D=128, C=900, L=900, K=512, row=row)
    # A query has two codes a byte and a scale for 32 of them, as a key.
    want = replace(of, bytes=of.bytes - 3 * 64 * (128 - row))
    assert call_costs.of("indexer_logits_topk_ragged", keys | {"topk": 512}) == want


def tensors_moved(op: str, args: tuple[Any, ...], *read: str) -> int:
    """Bytes of the arguments of these names and of the results."""
    arguments, result = named(op, args), OPS[op](*args)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    return sum(x.numel() * x.element_size() for x in (*(arguments[name] for name in read), *results))


@pytest.mark.parametrize("op", ["q_norm_rope", "q_norm_rope_kv_insert"])
def test_queries_that_are_padded_or_quantised_count_as_they_are_written(op: str) -> None:
    for args in op_samples(op):
        arguments = named(op, args)
        tokens, angles = arguments["q"].shape[0], 8 + 4 * arguments["cos_sin_cache"].shape[1]
        inserted = 0
        if "kv" in arguments:
            kv, e = arguments["kv"], arguments["q"].element_size()
            inserted = 8 + kv.shape[1] * e + costs.row_bytes(arguments["cache_format"], kv.shape[1], e)
        cost = call_costs.of(op, arguments)
        assert cost is not None and cost.bytes == tensors_moved(op, args, "q") + tokens * (angles + inserted)


@pytest.mark.parametrize("op", ["indexer_logits", "indexer_logits_topk", "indexer_topk_slots"])
def test_queries_of_an_indexer_count_in_the_format_they_are_in(op: str) -> None:
    for args in op_samples(op):
        arguments = named(op, args)
        queries = tensors_moved(op, args, "q", "q_scale", "weights", "token_to_req", "context_lens")
        requests, pages = arguments["block_table"].shape
        entries = min(arguments["q"].shape[0], requests) * pages * arguments["block_size"]
        fmt, dim = arguments["cache_format"], arguments["q"].shape[2]
        cost = call_costs.of(op, arguments)
        assert cost is not None
        assert cost.bytes == queries + entries * costs.row_bytes(fmt, dim, arguments["q"].element_size())


def test_quantised_queries_of_an_indexer_count_as_they_are_written() -> None:
    for args in op_samples("indexer_q_rope_quant"):
        arguments = named("indexer_q_rope_quant", args)
        angles = 8 + 4 * arguments["cos_sin_cache"].shape[1]
        weights = arguments["weights"].numel() * (arguments["q"].element_size() - arguments["weights"].element_size())
        moved = tensors_moved("indexer_q_rope_quant", args, "q", "weights") + arguments["q"].shape[0] * angles
        cost = call_costs.of("indexer_q_rope_quant", arguments)
        assert cost is not None and cost.bytes == moved + weights


def test_heads_outside_of_a_group_and_results_in_float32_count_as_they_are() -> None:
    for op in ("inv_rope_fp8_quant", "sparse_mla_decode_quant"):
        name = "o" if op == "inv_rope_fp8_quant" else "q"
        arguments = named(op, op_samples(op)[0])
        heads = arguments["n_groups"] * arguments["heads_per_group"]
        assert heads < arguments[name].shape[1]
        assert call_costs.of(op, arguments) == call_costs.of(op, arguments | {name: arguments[name][:, :heads]})
    args = (*op_samples("grouped_linear")[0][:3], True)
    cost = call_costs.of("grouped_linear", named("grouped_linear", args))
    assert cost is not None and cost.bytes == tensors_moved("grouped_linear", args, "x", "weight")


def test_index_rows_of_prefill_count_the_columns_that_are_read_and_written() -> None:
    for args in op_samples("combine_topk_swa"):
        arguments = named("combine_topk_swa", args)
        read = 4 * arguments["topk_indices"].shape[0] * arguments["topk"]
        cost = call_costs.of("combine_topk_swa", arguments)
        assert cost is not None and cost.bytes == read + tensors_moved("combine_topk_swa", args)
