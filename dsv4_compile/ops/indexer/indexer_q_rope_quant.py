"""`torch.ops.dsv4.indexer_q_rope_quant`; what it computes is in reference/indexer_q_rope_quant.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.indexer import indexer_q_rope_quant as cpu
from ...layout import INDEXER_HEAD_DIM, MX_TILE
from ...reference.indexer import indexer_q_rope_quant as reference
from ...selection.costs import FLOAT32, FP8, CallSizes, Cost, CostModel, angles, row_bytes
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import (
    E4M3,
    FLOATS,
    INTS,
    expect,
    expect_dim,
    expect_hadamard_dim,
    expect_indexer_dim,
    expect_rope_table,
    expect_rows,
)


def _check(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> None:
    op = "indexer_q_rope_quant"
    expect(q, f"{op}: q [T, H, D]", FLOATS)
    expect(positions, f"{op}: positions [T]", INTS)
    expect(weights, f"{op}: weights [T, H]", FLOATS)
    dim = q.shape[2]
    expect_indexer_dim(dim, op, cache_format)
    expect_rope_table(cos_sin_cache, op, dim)
    expect_rows(positions.shape[0], q.shape[0], f"{op}: positions")
    expect_dim(weights.shape[0], q.shape[0], f"{op}: q and weights have the same tokens")
    expect_dim(weights.shape[1], q.shape[1], f"{op}: q and weights have the same heads")
    if hadamard:
        expect_hadamard_dim(dim, op)


def _fake(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, dim = q.shape
    folded = q.new_empty(tokens, heads, dtype=torch.float32)
    if cache_format == "indexer_mxfp4":
        values = q.new_empty(tokens, heads, dim // 2, dtype=torch.uint8)
        return values, q.new_empty(tokens, heads, dim // MX_TILE, dtype=torch.uint8), folded
    values = q.new_empty(tokens, heads, dim, dtype=E4M3 if cache_format == "indexer_fp8" else q.dtype)
    return values, q.new_empty(tokens, heads, 0, dtype=torch.float32), folded


def query_costs(call: CallSizes) -> list[Cost]:
    """Return the bytes that an indexer's queries add to those of e4m3; negative for MXFP4, scales included."""
    (tokens, heads, dim), cache_format = call.dims("q"), call.arguments["cache_format"]
    more = dim * (call.size("q") - FP8) if cache_format == "plain" else 0
    if cache_format == "indexer_mxfp4":
        more = row_bytes(cache_format) - INDEXER_HEAD_DIM
    return [Cost(tokens * heads * more, 0)]


indexer_q_rope_quant = define(
    "indexer_q_rope_quant",
    reference=reference.indexer_q_rope_quant,
    on_cpu=cpu.indexer_q_rope_quant,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.indexer.indexer_q_rope_quant",
    lowering="dsv4_compile.lowering.indexer.indexer_q_rope_quant",
    cost=CostModel(
        lambda T, H, D, rope, e=2: (T * (H * ((e + FP8) * D + e + FLOAT32) + angles(rope)), 0),
        sizes=lambda call: call.of_heads("q") | call.rope,
        added=query_costs,
    ),
    invariant=Invariance(rows=("q", "positions", "weights"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
