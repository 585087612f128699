"""`torch.ops.dsv4.indexer_logits`, `.indexer_logits_topk` and `.indexer_logits_topk_ragged`.

What they compute is in reference/indexer_logits_topk.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...errors import fail
from ...layout import INDEXER_HEAD_DIM, MX_TILE, PAGE_LAYOUTS
from ...reference.indexer import indexer_logits as reference
from ..common.define import define
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


def _check_queries(q: Tensor, q_scale: Tensor, weights: Tensor, op: str, cache_format: str) -> int:
    """Check what `indexer_q_rope_quant` returned and give the dims of a dequantised query."""
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


def _check_pages(
    op: str,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
) -> None:
    dim = _check_queries(q, q_scale, weights, op, cache_format)
    expect_indexer_cache(k_cache, op, cache_format, block_size, dim)
    expect(block_table, f"{op}: block_table [R, B]", torch.int32)
    for name, value in (("token_to_req", token_to_req), ("context_lens", context_lens)):
        expect(value, f"{op}: {name} [T]", INTS)
        expect_rows(value.shape[0], q.shape[0], f"{op}: {name}")


def _check_k(op: str, topk: int) -> None:
    if topk < 1:
        fail("E201", got=f"{op}: topk {topk}", rule="topk is positive")


def _check_logits(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    max_context: int,
) -> None:
    op = "indexer_logits"
    _check_pages(op, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format)
    if max_context < 0:
        fail("E201", got=f"{op}: max_context {max_context}", rule="max_context is not negative")


def check_selection(
    op: str,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
) -> None:
    """Refuse the arguments of a selection from pages, on behalf of `op`."""
    _check_pages(op, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format)
    _check_k(op, topk)


def _check_ragged(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int = reference.MAX_LOGITS_BYTES,
) -> None:
    op = "indexer_logits_topk_ragged"
    dim = _check_queries(q, q_scale, weights, op, cache_format)
    expect_gathered_keys(k, k_scale, op, cache_format, dim)
    for name, value in (("row_starts", row_starts), ("row_ends", row_ends)):
        expect(value, f"{op}: {name} [T]", INTS)
        expect_rows(value.shape[0], q.shape[0], f"{op}: {name}")
    _check_k(op, topk)
    if max_logits_bytes < 0:
        fail("E201", got=f"{op}: max_logits_bytes {max_logits_bytes}", rule="max_logits_bytes is not negative")


def _fake_logits(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    max_context: int,
) -> Tensor:
    return q.new_empty(q.shape[0], max_context, dtype=torch.float32)


def _fake_topk(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _fake_ragged(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int = reference.MAX_LOGITS_BYTES,
) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


indexer_logits = define(
    "indexer_logits(Tensor q, Tensor q_scale, Tensor weights, Tensor k_cache, Tensor block_table, "
    "Tensor token_to_req, Tensor context_lens, int block_size, str cache_format, int max_context) -> Tensor",
    reference=reference.indexer_logits,
    fake=_fake_logits,
    check=_check_logits,
)

indexer_logits_topk = define(
    "indexer_logits_topk(Tensor q, Tensor q_scale, Tensor weights, Tensor k_cache, Tensor block_table, "
    "Tensor token_to_req, Tensor context_lens, int block_size, str cache_format, int topk) -> Tensor",
    reference=reference.indexer_logits_topk,
    fake=_fake_topk,
    check=partial(check_selection, "indexer_logits_topk"),
)

indexer_logits_topk_ragged = define(
    "indexer_logits_topk_ragged(Tensor q, Tensor q_scale, Tensor weights, Tensor k, Tensor k_scale, "
    "Tensor row_starts, Tensor row_ends, str cache_format, int topk, "
    f"int max_logits_bytes={reference.MAX_LOGITS_BYTES}) -> Tensor",
    reference=reference.indexer_logits_topk_ragged,
    fake=_fake_ragged,
    check=_check_ragged,
)
