"""Schema, check and fake of `save_partial_states`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.preprocess import save_partial_states as cpu
from ...reference.preprocess import save_partial_states as reference
from ...selection.costs import FLOAT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_rows, expect_state_cache


def check_save(
    kv_score: Tensor,
    ape: Tensor,
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    positions: Tensor,
    block_size: int,
    op: str = "save_partial_states",
) -> None:
    """Raise if the arguments of `save_partial_states`, on behalf of `op`, are wrong."""
    expect(kv_score, f"{op}: kv_score [T, 2*w]", torch.float32)
    expect(ape, f"{op}: ape [C, w]", FLOATS)
    expect(state_slot_mapping, f"{op}: state_slot_mapping [N]", torch.int64)
    expect(positions, f"{op}: positions [N]", INTS)
    expect_dim(kv_score.shape[1], 2 * ape.shape[1], f"{op}: kv_score is twice as wide as ape")
    expect_state_cache(state_cache, op, block_size, kv_score.shape[1])
    expect_rows(kv_score.shape[0], state_slot_mapping.shape[0], f"{op}: kv_score")
    expect_rows(positions.shape[0], state_slot_mapping.shape[0], f"{op}: positions")


def _fake(
    kv_score: Tensor, ape: Tensor, state_cache: Tensor, state_slot_mapping: Tensor, positions: Tensor, block_size: int
) -> None:
    return None


save_partial_states = define(
    "save_partial_states",
    mutates=("state_cache",),
    reference=reference.save_partial_states,
    on_cpu=cpu.save_partial_states,
    fake=_fake,
    check=check_save,
    kernel="dsv4_compile.kernels.preprocess.save_partial_states",
    lowering="dsv4_compile.lowering.preprocess.save_partial_states",
    cost=CostModel(
        lambda T, width: (T * (2 * FLOAT32 * width + 2 * INT64), 0),
        sizes=lambda call: dict(zip(("T", "width"), call.dims("kv_score"), strict=True)),
    ),
    invariant=Invariance(rows=("kv_score", "state_slot_mapping", "positions"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
