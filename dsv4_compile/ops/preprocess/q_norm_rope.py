"""Schemas, checks and fakes of `q_norm_rope` and `q_norm_rope_kv_insert`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.preprocess import q_norm_rope as cpu
from ...reference.preprocess import q_norm_rope as reference
from ...reference.preprocess.q_norm_rope import QNormRopeKvInsertArguments
from ...selection.costs import FP8, CallSizes, Cost, CostModel, angles, inserted
from ..common.define import define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_rope_table, expect_rows, expect_scale
from .kv_rope_insert import check_kv_insert, insert_sizes


def _check_q(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
    op: str = "q_norm_rope",
) -> None:
    expect(q, f"{op}: q [T, H, D]", FLOATS)
    expect(positions, f"{op}: positions [T]", INTS)
    expect_rows(positions.shape[0], q.shape[0], f"{op}: positions")
    expect_rope_table(cos_sin_cache, op, q.shape[2])
    expect_scale(q_scale, f"{op}: q_scale")


def _check_both(call: QNormRopeKvInsertArguments) -> None:
    op = "q_norm_rope_kv_insert"
    _check_q(*(*call.queries(), op))
    check_kv_insert(*(*call.insert(), op))


def _fake_q(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    padded_heads: int = 0,
    q_scale: Tensor | None = None,
) -> Tensor:
    tokens, heads, dim = q.shape
    dtype = q.dtype if q_scale is None else torch.float8_e4m3fn
    return q.new_empty((tokens, max(heads, padded_heads), dim), dtype=dtype)


def _padding_cost(call: CallSizes) -> list[Cost]:
    """Return the bytes added or saved by padded or quantised queries."""
    (tokens, heads, dim), e = call.dims("q"), call.size("q")
    padded = max(heads, call.arguments.get("padded_heads", 0))
    written = padded * (e if call.arguments.get("q_scale") is None else FP8)
    return [Cost(tokens * dim * (written - heads * e), 0)]


q_norm_rope = define(
    "q_norm_rope",
    reference=reference.q_norm_rope,
    on_cpu=cpu.q_norm_rope,
    fake=_fake_q,
    check=_check_q,
    kernel="dsv4_compile.kernels.preprocess.q_norm_rope",
    lowering="dsv4_compile.lowering.preprocess.q_norm_rope",
    cost=CostModel(
        lambda T, H, D, rope, e=2: (T * (angles(rope) + 2 * e * H * D), 0),
        sizes=lambda call: call.of_heads("q") | call.rope,
        added=_padding_cost,
    ),
    invariant=Invariance(rows=("q", "positions"), on_cpu=AS_IT_IS, kernel=PINNED),
)
q_norm_rope_kv_insert = define(
    "q_norm_rope_kv_insert",
    mutates=("k_cache",),
    reference=reference.q_norm_rope_kv_insert,
    on_cpu=cpu.q_norm_rope_kv_insert,
    fake=lambda call: _fake_q(*call.queries()),
    check=_check_both,
    arguments=QNormRopeKvInsertArguments,
    kernel="dsv4_compile.kernels.preprocess.q_norm_rope",
    lowering="dsv4_compile.lowering.preprocess.q_norm_rope",
    cost=CostModel(
        lambda T, H, D, rope, row, e=2: (T * (angles(rope) + 2 * e * H * D + e * D + inserted(row)), 0),
        sizes=lambda call: call.of_heads("q") | insert_sizes(call),
        added=_padding_cost,
    ),
    invariant=Invariance(rows=("q", "kv", "slot_mapping", "positions"), on_cpu=AS_IT_IS, kernel=PINNED),
)
