"""Inductor IR for `q_norm_rope`, `kv_rope_insert` and `q_norm_rope_kv_insert`: one kernel for q, one for kv.

q: a row sum over [T, H | D] and a pointwise body over [T, H, D]; on C++ its reference is lowered instead (see
from_reference.py), but not to e4m3, which C++ cannot pad. kv: see ir_insert.py. Strided inputs are read where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..._compat import codegen_of, ir, ops
from ...layout import ROPE_DIM
from ...ops.common.define import REFERENCES
from ...selection.decisions import Call, Decision
from ..conditions import NO_PREDICATED_STORES, backend_lacks, cannot_rotate, decision
from ..from_reference import lower_from_reference
from ..ir.common import E4M3, I32, Expr, Load, Rope, Value, const, load_f32, result, row_sum, static
from ..ir.insert import Insert
from ..ir.quant import inverse_scale, to_e4m3
from ..registry import call_reference, lowers


def can_lower_q(call: Call) -> Decision:
    """IR for static head and rope dims."""
    why_not = backend_lacks(call, fp8=call.arguments["q_scale"] is not None) or cannot_rotate(call, "q")
    if not why_not and call.arguments["padded_heads"] and not static(call.arguments["q"].shape[1]):
        why_not = "a dynamic number of heads cannot be padded"
    return decision(call, why_not)


def can_lower_kv(call: Call) -> Decision:
    """IR on Triton, where stores can be predicated."""
    fmt = call.arguments["cache_format"]
    why_not = backend_lacks(call, fp8=fmt != "plain", predicated=True) or cannot_rotate(call, "kv")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    return decision(call, why_not)


def can_lower_both(call: Call) -> Decision:
    """IR where q has it; kv too, but on C++, where no kernel could take both instead."""
    q, kv = can_lower_q(call), can_lower_kv(call)
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
    # Read for the norm and, in the rope dims, by two lanes: a long producer is better computed before.
    q.mark_reuse(2)
    load_q, rope, inverse = load_f32(q), Rope.of(positions, cos_sin_cache), inverse_scale(q_scale)

    def live(h: Expr, body: Callable[[], Value]) -> Value:
        """`body()`, or 0 for a head that only pads."""
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


@lowers("kv_rope_insert", can_lower_kv)
def lower_kv(
    kv: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    block_size: int,
    cache_format: str,
    kv_scale: Any | None = None,
) -> None:
    """Build the IR of `kv_rope_insert`."""
    insert = Insert.of(kv, k_cache, slot_mapping, Rope.of(positions, cos_sin_cache), block_size)
    if cache_format == "fp8_ds_mla":
        insert.tiles()
    else:
        insert.rows(cache_format, kv_scale)


@lowers("q_norm_rope_kv_insert", can_lower_both)
def lower_both(
    q: Any,
    kv: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    cache_format: str,
    padded_heads: int = 0,
    q_scale: Any | None = None,
    kv_scale: Any | None = None,
) -> Any:
    """Build the IR of both halves, or on C++ of q alone."""
    insert = functools.partial(call_reference, "kv_rope_insert") if codegen_of(q.get_device()) == "cpp" else lower_kv
    insert(kv, k_cache, slot_mapping, positions, cos_sin_cache, block_size, cache_format, kv_scale)
    return lower_q(q, positions, cos_sin_cache, eps, padded_heads, q_scale)
