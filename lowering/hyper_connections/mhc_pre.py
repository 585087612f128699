"""Inductor IR for `mhc_pre`, traced from the reference.

The product with `fn` is torch's; norms, sums and coefficients fuse with the ops before and after. In C++ the
coefficients of a token are one loop over tokens, Sinkhorn iterations included.
"""

from __future__ import annotations

from typing import Any

from ...ops.common.define import REFERENCES
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..from_reference import lower_from_reference
from ..ir.common import static
from ..registry import lowers


def can_lower_streams(call: Call) -> Decision:
    """Return the decision for `call`: IR for a static number of streams and of channels."""
    why_not = backend_lacks(call)
    if not why_not and not static(*call.arguments["streams"].shape[1:]):
        why_not = "the number of streams or of channels is dynamic"
    return decision(call, why_not)


def yields(_: Call) -> str:
    """Return why `auto` leaves a call to its kernel."""
    return "the kernel computes all coefficients in one launch or two"


@lowers("mhc_pre", can_lower_streams, yields)
def lower(*arguments: Any) -> Any:
    """Build the IR."""
    return lower_from_reference(REFERENCES["mhc_pre"], *arguments)
