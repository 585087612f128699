"""`torch.ops.dsv4.cp_gather_indexer_k`; what it computes is in reference/cp_gather_indexer_k.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from ...layout import INDEXER_HEAD_DIM, PAGE_LAYOUTS
from ...reference.indexer import cp_gather_indexer_k as reference
from ...selection.costs import CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, describe, expect, expect_gathered_keys, expect_indexer_cache


def _check(
    k_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    k: Tensor,
    k_scale: Tensor,
    block_size: int,
    cache_format: str,
) -> None:
    op = "cp_gather_indexer_k"
    dim = INDEXER_HEAD_DIM if cache_format in PAGE_LAYOUTS else k_cache.shape[-1]
    expect_indexer_cache(k_cache, op, cache_format, block_size, dim)
    expect(block_table, f"{op}: block_table [R, B]", torch.int32)
    expect(cu_seq_lens, f"{op}: cu_seq_lens [requests + 1]", INTS)
    if cu_seq_lens.shape[0] == 0:
        fail("E201", got=describe(cu_seq_lens), rule=f"{op}: cu_seq_lens starts with 0")
    expect_gathered_keys(k, k_scale, op, cache_format, dim)
    if cache_format == "plain" and k.dtype is not k_cache.dtype:
        fail("E201", got=f"{describe(k)} from {describe(k_cache)}", rule=f"{op}: plain keys keep their dtype")


def _fake(
    k_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    k: Tensor,
    k_scale: Tensor,
    block_size: int,
    cache_format: str,
) -> None:
    return None


cp_gather_indexer_k = define(
    "cp_gather_indexer_k",
    mutates=("k", "k_scale"),
    reference=reference.cp_gather_indexer_k,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.indexer.cp_gather_indexer_k",
    cost=CostModel(
        lambda S, row: (2 * S * row, 0),
    ),
    invariant=EXACT,
)
