"""Inductor IR for `fused_q_kv_rmsnorm`: two kernels, because rows of the halves differ in length.

A row sum over [T | n] and a pointwise body over [T, n] for each half. Strided halves are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._compat import ops
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.common import Expr, Value, const, load_f32, result, row_sum, static
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR for static row lengths."""
    why_not = backend_lacks(call)
    if not why_not and not static(call.arguments["qr"].shape[1], call.arguments["kv"].shape[1]):
        why_not = "the length of a row is dynamic"
    return decision(call, why_not)


@lowers("fused_q_kv_rmsnorm", can_lower)
def lower(qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float) -> tuple[Any, Any]:
    """Build the IR."""
    return _rms_norm(qr, q_weight, eps), _rms_norm(kv, kv_weight, eps)


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    tokens, dim = x.get_size()
    dim = int(dim)
    # Read for the norm and for the result: a long producer is computed once, before.
    x.mark_reuse(2)
    load, load_weight = load_f32(x), load_f32(weight)

    def square(index: Sequence[Expr], d: Expr) -> Value:
        value = load([*index, d])
        return ops.mul(value, value)

    load_sum = row_sum(square, x.get_device(), [tokens], dim)

    def element(index: Sequence[Expr]) -> Value:
        t, d = index
        inverse = ops.rsqrt(ops.add(ops.truediv(load_sum([t]), const(dim)), const(eps)))
        return ops.mul(ops.mul(load([t, d]), inverse), load_weight([d]))

    return result(element, x.get_dtype(), x.get_device(), [tokens, dim])
