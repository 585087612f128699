"""Inductor IR for `compressed_slot_mapping`: one kernel over [N | R + 1].

The request of a token is the number of requests that start at or before it, less one: a sum over the requests, where
the reference searches. It is the same for starts that do not decrease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._compat import ops
from ...layout import PAD_INDEX
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.common import I64, Expr, Value, const, row_count
from ..ir.paging import legal_index, load_i64, lookup_slot, overwrite, within
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """IR for every call that the backend takes."""
    return decision(call, backend_lacks(call))


@lowers("compressed_slot_mapping", can_lower)
def lower(
    slot_mapping: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    block_size: int,
    ratio: int,
    out: Any,
) -> None:
    """Build the IR."""
    tokens, (starts,), (requests,) = slot_mapping.get_size()[0], query_start_loc.get_size(), seq_lens.get_size()
    load_slot, load_start, load_len = (load_i64(x) for x in (slot_mapping, query_start_loc, seq_lens))
    look_up = lookup_slot(block_table, block_size)

    def started(index: Sequence[Expr], r: Expr) -> Value:
        return ops.le(load_start([r]), ops.index_expr(index[0], I64))

    load_started = row_count(started, out.get_device(), out.get_size(), starts)

    def request(t: Expr) -> Value:
        return ops.sub(ops.to_dtype(load_started([t]), I64), const(1, I64))

    def in_batch(t: Expr) -> Value:
        known = ops.minimum(ops.index_expr(starts - 1, I64), ops.index_expr(requests, I64))
        return ops.logical_and(ops.lt(ops.index_expr(t, I64), ops.index_expr(tokens, I64)), within(request(t), known))

    def position(t: Expr) -> Value:
        row, token = legal_index(request(t), in_batch(t), starts), ops.index_expr(t, I64)
        start, end = load_start([row]), load_start([row + 1])
        in_query = ops.logical_and(ops.ge(token, start), ops.lt(token, end))
        stored = ops.ge(load_slot([t]), const(0, I64))
        seq_position = ops.add(ops.sub(token, end), load_len([row]))
        return ops.where(ops.logical_and(in_query, stored), seq_position, const(PAD_INDEX, I64))

    def entry(t: Expr) -> Value:
        def completed() -> Value:
            seen = ops.add(position(t), const(1, I64))
            group = ops.truncdiv(seen, const(ratio, I64))
            is_complete = ops.logical_and(ops.gt(seen, const(0, I64)), ops.eq(ops.mul(group, const(ratio, I64)), seen))
            return ops.where(is_complete, ops.sub(group, const(1, I64)), const(PAD_INDEX, I64))

        return ops.masked(in_batch(t), completed, PAD_INDEX)

    overwrite(out, lambda index: look_up(lambda: request(index[0]), lambda: entry(index[0])))
