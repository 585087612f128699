"""Inductor IR for `moe_route`: a GEMM and a sort; scores and weights fuse with neighbouring ops."""

from __future__ import annotations

from typing import Any

from ...ops.common.define import REFERENCES
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..from_reference import lower_from_reference
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR on every device that Inductor generates C++ or Triton for."""
    return decision(call, backend_lacks(call))


def yields(_: Call) -> str:
    """Return why `auto` leaves a call to its kernel."""
    return "IR is a GEMM, a sort and two kernels, the kernel one launch"


@lowers("moe_route", can_lower, yields)
def lower(*args: Any) -> Any:
    """Build the IR."""
    return lower_from_reference(REFERENCES["moe_route"], *args)
