"""Inductor IR for `q_norm_rope` and `q_norm_rope_kv_insert`: one kernel for q and that of `kv_rope_insert`.

A row sum over [T, H | D] and a pointwise body over [T, H, D]. In C++ the reference is lowered instead (see
from_reference.py), except to e4m3, which C++ cannot pad. Strided inputs are read in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..._compat import codegen_of, ir, ops
from ...ops.common.define import REFERENCES
from ...selection.decisions import Call, Decision
from ..conditions import NO_PREDICATED_STORES, backend_lacks, cannot_rotate, decision
from ..from_reference import lower_from_reference
from ..ir.common import E4M3, I32, Expr, Load, Rope, Value, const, load_f32, result, row_sum, static
from ..ir.quant import inverse_scale, to_e4m3
from ..registry import call_reference, lowers
from . import kv_rope_insert


def can_lower_q(call: Call) -> Decision:
    """Return the decision for `call`: IR for static head and rope dims."""
    why_not = backend_lacks(call, fp8=call.arguments["q_scale"] is not None) or cannot_rotate(call, "q")
    if not why_not and call.arguments["padded_heads"] and not static(call.arguments["q"].shape[1]):
        why_not = "a dynamic number of heads cannot be padded"
    return decision(call, why_not)


def can_lower_both(call: Call) -> Decision:
    """Return the decision for `call`: IR if both halves have it, in C++ if q has it."""
    q, kv = can_lower_q(call), kv_rope_insert.can_lower(call)
    if q.impl != "ir" or kv.impl == "ir":
        return q
    if kv.reason == NO_PREDICATED_STORES:
        return call.choose("ir", f"Inductor IR for q; the reference inserts kv: {kv.reason}")
    return kv


@lowers("q_norm_rope", can_lower_q)
def lower_q(
    q: Any, positions: Any, cos_sin_cache: Any, eps: float, padded_heads: int = 0, q_scale: Any | None = None
) -> Any:
    """Build the IR of `q_norm_rope`."""
    if q_scale is None and codegen_of(q.get_device()) == "cpp":
        return lower_from_reference(REFERENCES["q_norm_rope"], q, positions, cos_sin_cache, eps, padded_heads)
    tokens, heads, dim = q.get_size()
    dim, padded = int(dim), bool(padded_heads and padded_heads > heads)
    out_heads = padded_heads if padded else heads
    # Read for the norm and, in the rope dims, by two lanes: a long producer is computed once, before.
    q.mark_reuse(2)
    load_q, rope, inverse = load_f32(q), Rope.of(positions, cos_sin_cache), inverse_scale(q_scale)

    def live(h: Expr, body: Callable[[], Value]) -> Value:
        """Return `body()`, or 0 for a padding head."""
        if not padded:
            return body()
        return ops.masked(ops.lt(ops.index_expr(h, I32), ops.index_expr(heads, I32)), body, 0.0)

    def square(index: Sequence[Expr], d: Expr) -> Value:
        value = live(index[1], lambda: load_q([*index, d]))
        return ops.mul(value, value)

    load_sum = row_sum(square, q.get_device(), [tokens, out_heads], dim)

    def normed(t: Expr, h: Expr) -> Load:
        def load(d: Expr) -> Value:
            mean = ops.truediv(load_sum([t, h]), const(dim))
            return ops.mul(load_q([t, h, d]), ops.rsqrt(ops.add(mean, const(eps))))

        return load

    def element(index: Sequence[Expr]) -> Value:
        t, h, d = index

        def body() -> Value:
            value = rope.apply(normed(t, h), t, d, dim)
            return value if inverse is None else ops.mul(value, inverse())

        return live(h, body)

    device, size = q.get_device(), [tokens, out_heads, dim]
    if inverse is None:
        return result(element, q.get_dtype(), device, size)
    return ir.Pointwise.create(device=device, dtype=E4M3, inner_fn=lambda index: to_e4m3(element(index)), ranges=size)


@lowers("q_norm_rope_kv_insert", can_lower_both)
def lower_both(call: Any) -> Any:
    """Build the IR of both halves, or in C++ of q alone. `call` is a `QNormRopeKvInsertArguments` of IR tensors."""
    on_cpp = codegen_of(call.q.get_device()) == "cpp"
    insert = functools.partial(call_reference, "kv_rope_insert") if on_cpp else kv_rope_insert.lower
    insert(*call.insert())
    return lower_q(*call.queries())
