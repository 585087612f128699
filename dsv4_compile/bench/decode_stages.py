"""Stages of a decode layer: the cost of each, and the nodes of a CUDA graph that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import layout
from ..config import CSA, DeepseekV4Config
from ..selection import costs
from .nodes import Node

HIDDEN, INSERT, LATENT, QUERIES, INDEXER = "of hidden", "insert", "of latent", "indexer queries", "indexer"
ATTENTION, WO_A, WO_B = "attention", "wo_a", "wo_b"
_STAGE_OF_KERNEL = {
    "indexer_q": QUERIES,
    "indexer": INDEXER,
    "select": INDEXER,
    "topk": INDEXER,
    "insert": INSERT,
    "compress": INSERT,
    "partial_states": INSERT,
    "rmsnorm": INSERT,
    "sparse_mla": ATTENTION,
    "combine": ATTENTION,
    "inv_rope": ATTENTION,
    "split_softmax": ATTENTION,
}
"""Stages by parts of kernel names; a kernel without any of them is a GEMM."""


def stage_costs(
    config: DeepseekV4Config, layer: int, fp8: bool, tokens: int, context: int, apart: bool = False
) -> dict[str, costs.Cost]:
    """Return the cost of each stage of `layer` in a step of `tokens` requests of `context` tokens.

    All requests close a group, or, `apart`, one in R of them a group of ratio R.
    """
    ratio, indexes = config.ratio(layer), config.kind(layer) == CSA
    heads, dim, rank, width = config.num_heads, config.head_dim, config.q_lora_rank, config.hidden_size
    row = costs.row_bytes("fp8_ds_mla", dim)
    entries = context // ratio if ratio > 1 else 0
    stages = {HIDDEN: _gemm(tokens, width, rank + dim, fp8), LATENT: _gemm(tokens, rank, heads * dim, fp8)}
    stages[INSERT] = costs.of("preprocess_insert", T=tokens, Q=rank, D=dim, rope=config.rope_dim, row=row)
    if ratio > 1:
        pairs = [(dim, row)]
        if indexes:
            pairs.append((config.index_head_dim, costs.row_bytes("indexer_fp8", config.index_head_dim)))
        for pooled, size in pairs:
            wide = layout.state_width(ratio, pooled)
            stages[HIDDEN] = _sum(stages[HIDDEN], _gemm(tokens, width, wide, fp8=False))
            saved = costs.of("save_partial_states", T=tokens, width=wide)
            window = ratio * wide // (2 * pooled)
            closing = layout.cdiv(tokens, ratio) if apart else tokens
            closed = costs.of("compress_norm_rope_insert", T=tokens, C=closing, W=window, D=pooled, row=size)
            stages[INSERT] = _sum(stages[INSERT], saved, closed)
    if indexes:
        index = {"T": tokens, "H": config.index_n_heads, "D": config.index_head_dim}
        size = costs.row_bytes("indexer_fp8", config.index_head_dim)
        stages[HIDDEN] = _sum(stages[HIDDEN], _gemm(tokens, width, config.index_n_heads, fp8=False))
        stages[LATENT] = _sum(stages[LATENT], _gemm(tokens, rank, index["H"] * index["D"], fp8))
        stages[QUERIES] = costs.of("indexer_q_rope_quant", **index, rope=config.rope_dim)
        topk = min(entries, config.index_topk)
        stages[INDEXER] = costs.of("indexer_topk_slots", **index, C=tokens * entries, L=entries, K=topk, row=size)
        entries = topk
    keys = min(config.sliding_window, context) + entries
    stages[ATTENTION] = costs.of("sparse_mla_decode", T=tokens, H=heads, K=keys, D=dim, row=row)
    groups, rank_o = config.o_groups, config.o_lora_rank
    of_group = {"T": tokens, "G": groups, "N": rank_o, "K": heads * dim // groups}
    stages[WO_A] = costs.of("fp8_grouped_einsum" if fp8 else "grouped_linear", **of_group)
    stages[WO_B] = _gemm(tokens, groups * rank_o, width, fp8)
    return stages


def total(stages: Mapping[str, costs.Cost]) -> costs.Cost:
    """Return the cost of a layer."""
    return _sum(*stages.values())


def stage_times(layer: Sequence[Node]) -> dict[str, list[Node]]:
    """Return the nodes of one layer by stage; a GEMM's stage follows from its place around insert and attention."""
    stages: dict[str, list[Node]] = {}
    gemms = 0
    for node in layer:
        named = next((stage for keyword, stage in _STAGE_OF_KERNEL.items() if keyword in node.name), None)
        if named is None:
            if node.name.startswith("triton_") and INSERT in stages and ATTENTION not in stages:
                named = QUERIES  # the only kernel of a layer that Inductor may generate
            elif ATTENTION in stages:
                named = WO_B if gemms else WO_A
                gemms += 1
            else:
                named = LATENT if INSERT in stages else HIDDEN
        stages.setdefault(named, []).append(node)
    return stages


def _gemm(tokens: int, k: int, n: int, fp8: bool) -> costs.Cost:
    if fp8:
        return costs.of("fp8_linear", T=tokens, K=k, N=n)
    return costs.of("grouped_linear", T=tokens, G=1, K=k, N=n)


def _sum(*parts: costs.Cost) -> costs.Cost:
    narrow = any(cost.operands == "e4m3" for cost in parts)
    operands = "e4m3" if narrow else "bfloat16"
    return costs.Cost(sum(cost.bytes for cost in parts), sum(cost.flops for cost in parts), operands)
