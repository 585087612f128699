"""Schema, check and fake of `dequantize_and_gather_k_cache`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.preprocess import dequantize_and_gather_k_cache as reference
from ...selection.costs import CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import FLOATS, expect, expect_dim, expect_kv_cache


def _check(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
) -> None:
    op = "dequantize_and_gather_k_cache"
    expect(out, f"{op}: out [B, M, D]", FLOATS)
    expect(seq_lens, f"{op}: seq_lens [B]", torch.int32)
    expect(block_table, f"{op}: block_table [B, blocks]", torch.int32)
    expect_dim(seq_lens.shape[0], out.shape[0], f"{op}: seq_lens has a length for every request of out")
    expect_dim(block_table.shape[0], out.shape[0], f"{op}: block_table has a row for every request of out")
    if gather_lens is not None:
        expect(gather_lens, f"{op}: gather_lens [B]", torch.int32)
        expect_dim(gather_lens.shape[0], out.shape[0], f"{op}: gather_lens has a length for every request of out")
    check(0 <= offset <= out.shape[1], "E201", got=f"offset {offset}", rule=f"{op}: offset is a row of out or its end")
    expect_kv_cache(k_cache, op, cache_format, block_size, out.shape[2], kv_scale)


def _fake(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
) -> None:
    return None


dequantize_and_gather_k_cache = define(
    "dequantize_and_gather_k_cache",
    mutates=("out",),
    reference=reference.dequantize_and_gather_k_cache,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.preprocess.dequantize_and_gather_k_cache",
    cost=CostModel(
        lambda D, S, row, e=2: (S * (row + e * D), 0),
    ),
    invariant=EXACT,
)
