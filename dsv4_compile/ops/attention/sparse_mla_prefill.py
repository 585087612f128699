"""Schemas, checks and fakes of `sparse_mla_prefill` and its list form; reference/attention/ defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.attention import sparse_mla_prefill as reference
from ...reference.attention.sparse_mla_prefill import PrefillArguments, RaggedPrefillArguments
from ...selection.costs import FLOAT32, INT32, CostModel
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_rows
from .sparse_mla_decode import head_bytes, ragged_sizes


def _check_operands(op: str, call: PrefillArguments | RaggedPrefillArguments) -> None:
    expect(call.q, f"{op}: q [T, H, D]", FLOATS)
    expect(call.kv, f"{op}: kv [S, D]", FLOATS)
    expect_dim(call.kv.shape[1], call.q.shape[2], f"{op}: kv has the head dim of q")
    if call.attn_sink is not None:
        expect(call.attn_sink, f"{op}: attn_sink [H]", torch.float32)
        expect_dim(call.attn_sink.shape[0], call.q.shape[1], f"{op}: attn_sink has one logit for every head of q")


def _check(call: PrefillArguments) -> None:
    op = "sparse_mla_prefill"
    _check_operands(op, call)
    expect(call.indices, f"{op}: indices [T, A]", INTS)
    expect_rows(call.indices.shape[0], call.q.shape[0], f"{op}: indices")
    if call.topk_length is not None:
        expect(call.topk_length, f"{op}: topk_length [T]", INTS)
        expect_rows(call.topk_length.shape[0], call.q.shape[0], f"{op}: topk_length")


def _check_ragged(call: RaggedPrefillArguments) -> None:
    op = "sparse_mla_prefill_ragged"
    _check_operands(op, call)
    expect(call.indices, f"{op}: indices [N]", INTS)
    expect(call.indptr, f"{op}: indptr [T + 1]", INTS)
    expect_rows(call.indptr.shape[0] - 1, call.q.shape[0], f"{op}: indptr, its first element aside,")
    check(call.max_row >= 0, "E201", got=f"{op}: max_row {call.max_row}", rule="max_row is at least 0; 0 is no bound")


def _fake(call: PrefillArguments | RaggedPrefillArguments) -> tuple[Tensor, Tensor, Tensor]:
    q, rows = call.q, call.q.shape[:2]
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


sparse_mla_prefill = define(
    "sparse_mla_prefill",
    arguments=PrefillArguments,
    reference=reference.sparse_mla_prefill,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.attention.sparse_mla_prefill",
    cost=CostModel(
        lambda T, H, D, K, S, e=2: (
            e * S * D + T * (INT32 * K + FLOAT32 * H) + head_bytes(T, H, D, e),
            4 * T * H * K * D,
        ),
        sizes=lambda call: call.of_heads("q") | {"K": call.dims("indices")[-1], "S": call.dims("kv")[0]},
    ),
)

sparse_mla_prefill_ragged = define(
    "sparse_mla_prefill_ragged",
    arguments=RaggedPrefillArguments,
    reference=reference.sparse_mla_prefill_ragged,
    fake=_fake,
    check=_check_ragged,
    kernel="dsv4_compile.kernels.attention.sparse_mla_prefill",
    cost=CostModel(
        lambda T, H, D, K, S, e=2: (
            e * S * D + T * (INT32 * K + FLOAT32 * H) + head_bytes(T, H, D, e),
            4 * T * H * K * D,
        ),
        sizes=ragged_sizes,
    ),
)
