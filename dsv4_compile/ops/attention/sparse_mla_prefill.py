"""`torch.ops.dsv4.sparse_mla_prefill` and `.sparse_mla_prefill_ragged`; see reference/sparse_mla_prefill.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.attention import sparse_mla_prefill as reference
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_rows


def _check_operands(op: str, q: Tensor, kv: Tensor, attn_sink: Tensor | None) -> None:
    expect(q, f"{op}: q [T, H, D]", FLOATS)
    expect(kv, f"{op}: kv [S, D]", FLOATS)
    expect_dim(kv.shape[1], q.shape[2], f"{op}: kv has the head dim of q")
    if attn_sink is not None:
        expect(attn_sink, f"{op}: attn_sink [H]", torch.float32)
        expect_dim(attn_sink.shape[0], q.shape[1], f"{op}: attn_sink has one logit for every head of q")


def _check(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> None:
    op = "sparse_mla_prefill"
    _check_operands(op, q, kv, attn_sink)
    expect(indices, f"{op}: indices [T, A]", INTS)
    expect_rows(indices.shape[0], q.shape[0], f"{op}: indices")
    if topk_length is not None:
        expect(topk_length, f"{op}: topk_length [T]", INTS)
        expect_rows(topk_length.shape[0], q.shape[0], f"{op}: topk_length")


def _check_ragged(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> None:
    op = "sparse_mla_prefill_ragged"
    _check_operands(op, q, kv, attn_sink)
    expect(indices, f"{op}: indices [N]", INTS)
    expect(indptr, f"{op}: indptr [T + 1]", INTS)
    expect_rows(indptr.shape[0] - 1, q.shape[0], f"{op}: indptr, its first element aside,")
    check(max_row >= 0, "E201", got=f"{op}: max_row {max_row}", rule="max_row is not negative; 0 is no bound")


def _fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:2]
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


sparse_mla_prefill = define(
    "sparse_mla_prefill(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, float scale, "
    "Tensor? attn_sink=None) -> (Tensor, Tensor, Tensor)",
    reference=reference.sparse_mla_prefill,
    fake=_fake,
    check=_check,
)

sparse_mla_prefill_ragged = define(
    "sparse_mla_prefill_ragged(Tensor q, Tensor kv, Tensor indices, Tensor indptr, float scale, "
    "Tensor? attn_sink=None, int max_row=0) -> (Tensor, Tensor, Tensor)",
    reference=reference.sparse_mla_prefill_ragged,
    fake=_fake,
    check=_check_ragged,
)
