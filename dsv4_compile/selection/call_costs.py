"""The cost of one call from its arguments, as the code that chooses an implementation sees them: by their shapes alone.

    cost = call_costs.of("sparse_mla_decode", arguments)  # the most that the call can have to do

What a call touches depends on values that nobody knows while it is compiled. So index rows count at their full width,
an indexer scores as many entries as its block table has room for, and of a compressor one token in R closes a group of
ratio R. Dynamic dims count with the size they were traced with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import costs


def names() -> tuple[str, ...]:
    """The ops whose arguments tell their cost."""
    return tuple(op for op, model in costs.MODELS.items() if model.sizes is not None)


def of(op: str, arguments: Mapping[str, Any]) -> costs.Cost | None:
    """Cost of a call of `op`, or None where its arguments do not tell."""
    model = costs.MODELS.get(op)
    if model is None or model.sizes is None:
        return None
    call = costs.CallSizes(arguments)
    try:
        known = costs.sizes(op)
        cost = costs.of(op, **{name: size for name, size in model.sizes(call).items() if name in known})
        terms = [cost, *(model.added(call) if model.added is not None else ())]
    except (ValueError, ZeroDivisionError):  # a size without a number, or sums of nothing
        return None
    return costs.Cost(sum(term.bytes for term in terms), sum(term.flops for term in terms), cost.operands)
