"""Inductor IR for `save_partial_states`: one predicated store over [N, 2 * w]. Strided inputs are read in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._compat import ops
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.common import I32, I64, Expr, Value, const, load_f32, static
from ..ir.paging import Slot, Store, scatter, slot_of
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR in Triton, where stores can be predicated."""
    why_not = backend_lacks(call, predicated=True)
    if not why_not and not static(*call.arguments["ape"].shape):
        why_not = "the ratio or the width of a state is dynamic"
    return decision(call, why_not)


@lowers("save_partial_states", can_lower)
def lower(kv_score: Any, ape: Any, state_cache: Any, state_slot_mapping: Any, positions: Any, block_size: int) -> None:
    """Build the IR."""
    ratio, width = (int(size) for size in ape.get_size())
    rows = state_slot_mapping.get_size()[0]
    load, load_bias = kv_score.make_loader(), load_f32(ape)
    load_slot, load_position = state_slot_mapping.make_loader(), positions.make_loader()

    def slot(t: Expr) -> Slot:
        return slot_of(load_slot, t, state_cache.get_size()[0], block_size)

    def bias(t: Expr, column: Expr) -> Value:
        remainder = ops.mod(ops.to_dtype(load_position([t]), I64), const(ratio, I64))
        negative = ops.lt(remainder, const(0, I64))
        ape_row = ops.where(negative, ops.add(remainder, const(ratio, I64)), remainder)
        row = ops.indirect_indexing(ape_row, ratio, check=False, wrap_neg=False)
        return load_bias([row, column - width])

    def value(index: Sequence[Expr]) -> Value:
        t, column = index
        is_score = ops.ge(ops.index_expr(column, I32), const(width, I32))
        # Selected, not added as 0, which would turn -0.0 into 0.0.
        biased = ops.masked(is_score, lambda: ops.add(load([t, column]), bias(t, column)), 0.0)
        return ops.where(is_score, biased, load([t, column]))

    def target(index: Sequence[Expr]) -> list[Expr]:
        where = slot(index[0])
        return [where.block, where.offset, index[1]]

    scatter(state_cache, [rows, 2 * width], [Store(lambda index: slot(index[0]).valid, target, value)])
