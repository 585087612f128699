"""Inductor IR for `global_topk`: one kernel, the slots over [T, K] and their count over [T | K].

`global_topk_ragged` and `ragged_from_dense` pack rows by a sort and a prefix sum and are not lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._compat import ir, ops
from ...layout import PAD_INDEX, PAD_LEN
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.common import I32, I64, Expr, Value, const, row_count
from ..ir.paging import lookup_slot
from ..registry import lowers

_INT32_MAX = 2**31 - 1


def can_lower(call: Call) -> Decision:
    """IR for every call that the backend takes."""
    return decision(call, backend_lacks(call))


@lowers("global_topk", can_lower)
def lower(
    topk_indices: Any, token_to_req: Any, block_table: Any, is_valid_token: Any, block_size: int
) -> tuple[Any, Any]:
    """Build the IR."""
    tokens, *middle, width = topk_indices.get_size()
    device = topk_indices.get_device()
    load, load_request, load_valid = (x.make_loader() for x in (topk_indices, token_to_req, is_valid_token))
    look_up = lookup_slot(block_table, block_size)

    def slot(index: Sequence[Expr]) -> Value:
        t, k = index
        global_slot = look_up(
            lambda: ops.to_dtype(load_request([t]), I64),
            lambda: ops.to_dtype(load([t, *[0] * len(middle), k]), I64),
        )
        fits = ops.le(global_slot, const(_INT32_MAX, I64))
        return ops.to_dtype(ops.where(fits, global_slot, const(PAD_INDEX, I64)), I32)

    slots = ir.Pointwise.create(device=device, dtype=I32, inner_fn=slot, ranges=[tokens, width])
    slots.realize()
    load_slot = slots.make_loader()
    load_count = row_count(lambda index, k: ops.ge(load_slot([*index, k]), const(0, I32)), device, [tokens], width)

    def count(index: Sequence[Expr]) -> Value:
        return ops.where(load_valid(index), load_count(index), const(PAD_LEN, I32))

    return slots, ir.Pointwise.create(device=device, dtype=I32, inner_fn=count, ranges=[tokens])
