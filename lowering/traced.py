"""Lowerings of the ops whose definition says `Traced`: the IR of their references."""

from __future__ import annotations

from functools import partial
from typing import Any

from .._compat import register_lowering
from ..ops.common.define import LOWERED, REFERENCES, Traced
from ..selection.decisions import Call, Decision
from .conditions import backend_lacks, decision
from .from_reference import lower_from_reference
from .ir.common import static
from .registry import LOWERINGS, Lowering, twin


def can_lower(how: Traced, call: Call) -> Decision:
    """Return the decision for `call`: IR on every device that Inductor generates C++ or Triton for."""
    why_not = backend_lacks(call)
    dynamic = [name for name in how.static if not static(*call.arguments[name].shape[1:])]
    if dynamic and not why_not:
        why_not = f"a dim of {' and of '.join(dynamic)} after the first is dynamic"
    return decision(call, why_not)


def yields(how: Traced, _: Call) -> str:
    """Return why `auto` leaves a call to its kernel."""
    return how.yields


for _op, _how in LOWERED.items():
    if isinstance(_how, Traced):
        _lower: Any = partial(lower_from_reference, REFERENCES[_op])
        LOWERINGS[_op] = Lowering(partial(can_lower, _how), _lower, partial(yields, _how))
        register_lowering(twin(_op, "ir"), type_promotion_kind=None)(_lower)
