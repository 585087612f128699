"""Schemas, checks and fakes of `indexer_logits` and its variants; reference/indexer/ defines what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cpu.indexer import indexer_logits as cpu
from ...errors import fail
from ...layout import INDEXER_HEAD_DIM, MX_TILE, PAGE_LAYOUTS
from ...reference.indexer import indexer_logits as reference
from ...reference.indexer.indexer_logits import LogitsArguments, PagedArguments, RaggedTopkArguments, TopkArguments
from ...selection.costs import FLOAT32, INT32, CallSizes, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import (
    E4M3,
    FLOATS,
    INTS,
    expect,
    expect_dim,
    expect_gathered_keys,
    expect_indexer_cache,
    expect_indexer_format,
    expect_rows,
)
from ..common.validate_batch import expect_positive
from .indexer_q_rope_quant import query_costs

_LOGITS, _TOPK, _RAGGED = "indexer_logits", "indexer_logits_topk", "indexer_logits_topk_ragged"


def _check_queries(op: str, call: PagedArguments | RaggedTopkArguments) -> int:
    """Check what `indexer_q_rope_quant` returned, and return the dims of a dequantised query."""
    q, q_scale, weights, cache_format = call.q, call.q_scale, call.weights, call.cache_format
    expect_indexer_format(op, cache_format)
    dtypes = {"indexer_fp8": E4M3, "indexer_mxfp4": torch.uint8}.get(cache_format, FLOATS)
    expect(q, f"{op}: q [T, H, {cache_format} D]", dtypes)
    dim = INDEXER_HEAD_DIM if cache_format in PAGE_LAYOUTS else q.shape[2]
    is_mxfp4 = cache_format == "indexer_mxfp4"
    expect_dim(q.shape[2], dim // 2 if is_mxfp4 else dim, f"{op}: q is stored in {cache_format}")
    expect(q_scale, f"{op}: q_scale [T, H, tiles]", torch.uint8 if is_mxfp4 else torch.float32)
    expect_dim(q_scale.shape[2], dim // MX_TILE if is_mxfp4 else 0, f"{op}: last dim of q_scale for {cache_format}")
    expect(weights, f"{op}: weights [T, H]", torch.float32)
    for name, value in (("q_scale", q_scale), ("weights", weights)):
        expect_dim(value.shape[0], q.shape[0], f"{op}: q and {name} have the same tokens")
        expect_dim(value.shape[1], q.shape[1], f"{op}: q and {name} have the same heads")
    return dim


def _check_per_token(op: str, tokens: int, **values: Tensor) -> None:
    for name, value in values.items():
        expect(value, f"{op}: {name} [T]", INTS)
        expect_rows(value.shape[0], tokens, f"{op}: {name}")


def _check_pages(op: str, call: PagedArguments) -> None:
    dim = _check_queries(op, call)
    expect_indexer_cache(call.k_cache, op, call.cache_format, call.block_size, dim)
    expect(call.block_table, f"{op}: block_table [R, B]", torch.int32)
    _check_per_token(op, call.q.shape[0], token_to_req=call.token_to_req, context_lens=call.context_lens)


def _check_logits(call: LogitsArguments) -> None:
    _check_pages(_LOGITS, call)
    if call.max_context < 0:
        fail("E201", got=f"{_LOGITS}: max_context {call.max_context}", rule="max_context is not negative")


def check_topk(call: TopkArguments, op: str = _TOPK) -> None:
    """Check the arguments of a selection from pages, on behalf of `op`."""
    _check_pages(op, call)
    expect_positive(op, topk=call.topk)


def _check_ragged(call: RaggedTopkArguments) -> None:
    dim = _check_queries(_RAGGED, call)
    expect_gathered_keys(call.k, call.k_scale, _RAGGED, call.cache_format, dim)
    _check_per_token(_RAGGED, call.q.shape[0], row_starts=call.row_starts, row_ends=call.row_ends)
    expect_positive(_RAGGED, topk=call.topk)
    if call.max_logits_bytes < 0:
        got = f"{_RAGGED}: max_logits_bytes {call.max_logits_bytes}"
        fail("E201", got=got, rule="max_logits_bytes is not negative")


def _fake_logits(call: LogitsArguments) -> Tensor:
    return call.q.new_empty(call.q.shape[0], call.max_context, dtype=torch.float32)


def _fake_topk(call: TopkArguments | RaggedTopkArguments) -> Tensor:
    return call.q.new_empty(call.q.shape[0], call.topk, dtype=torch.int32)


def query_bytes(H: Any, D: Any) -> Any:
    """Return the bytes of a token's e4m3 queries, their weights, and its request and length."""
    return H * (D + FLOAT32) + 2 * INT32


def scored_sizes(call: CallSizes) -> dict[str, int]:
    """Return the sizes of a call that scores all entries of its block table."""
    q = _query_sizes(call)
    requests, pages = call.dims("block_table")
    entries = pages * call.arguments["block_size"]
    sizes = q | {"L": entries, "C": min(q["T"], requests) * entries, "K": call.arguments.get("topk", 0)}
    return sizes | call.row(q["D"], "q")


def _gathered_sizes(call: CallSizes) -> dict[str, int]:
    """Return the sizes of a call with gathered keys, which every token may score."""
    q, keys = _query_sizes(call), call.dims("k")[0]
    return q | {"L": keys, "C": keys, "K": call.arguments["topk"]} | call.row(q["D"], "q")


def _query_sizes(call: CallSizes) -> dict[str, int]:
    q = call.of_heads("q")
    if call.arguments["cache_format"] == "indexer_mxfp4":
        q["D"] *= 2  # two codes a byte
    return q


indexer_logits = define(
    "indexer_logits",
    arguments=LogitsArguments,
    reference=reference.indexer_logits,
    fake=_fake_logits,
    check=_check_logits,
    kernel="dsv4_compile.kernels.indexer.indexer_logits",
    cost=CostModel(
        lambda T, H, D, L, C, row: (C * row + T * (query_bytes(H, D) + FLOAT32 * L), 2 * T * H * D * L),
        sizes=scored_sizes,
        added=query_costs,
        operands="e4m3",
    ),
)
indexer_logits_topk = define(
    "indexer_logits_topk",
    arguments=TopkArguments,
    reference=reference.indexer_logits_topk,
    on_cpu=cpu.indexer_logits_topk,
    fake=_fake_topk,
    check=check_topk,
    kernel="dsv4_compile.kernels.indexer.indexer_logits",
    cost=CostModel(
        lambda T, H, D, K, L, C, row: (C * row + T * (query_bytes(H, D) + INT32 * K), 2 * T * H * D * L),
        sizes=scored_sizes,
        added=query_costs,
        operands="e4m3",
    ),
    invariant=Invariance(
        rows=("q", "q_scale", "weights", "token_to_req", "context_lens"), on_cpu=AS_IT_IS, kernel=AS_IT_IS
    ),
)
indexer_logits_topk_ragged = define(
    "indexer_logits_topk_ragged",
    arguments=RaggedTopkArguments,
    reference=reference.indexer_logits_topk_ragged,
    fake=_fake_topk,
    check=_check_ragged,
    kernel="dsv4_compile.kernels.indexer.indexer_logits",
    cost=CostModel(
        lambda T, H, D, K, L, C, row: (C * row + T * (query_bytes(H, D) + INT32 * K), 2 * T * H * D * L),
        sizes=_gathered_sizes,
        added=query_costs,
        operands="e4m3",
    ),
)
