"""Inductor IR for `moe_experts` in floating formats: two reductions that read each chosen expert's weight where it is.

A row of a weight is selected by an index inside the reduction over K, so nothing is gathered or copied; SwiGLU, the
weighted sum and neighbouring ops fuse with the reductions. This reads a weight once for every token that takes it,
which suits few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.moe.expert_weights import weight_format
from ...reference.moe.moe_experts import ExpertsArguments, clamped_swiglu, local_experts
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..from_reference import lower_from_reference
from ..ir.common import static
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR for floating weights."""
    why_not = backend_lacks(call)
    for name in ("w13", "w2", "shared_w13", "shared_w2"):
        weight = call.arguments.get(name)
        if not why_not and weight is not None and weight_format(weight) != "float":
            why_not = f"lowered for floating weights, {name} is {weight.dtype}"
        if not why_not and weight is not None and not static(*weight.shape):
            why_not = f"the size of {name} is dynamic"
    return decision(call, why_not)


def yields(_: Call) -> str:
    """Return why `auto` leaves a call to its kernel."""
    return "the kernel multiplies on tensor cores"


def by_place(*arguments: Any) -> Tensor:
    """Compute `moe_experts` for each place of each token."""
    call = ExpertsArguments(*arguments)
    (local, valid), x = local_experts(call), call.x.float()
    gate_up = (call.w13[local].float() * x[:, None, None, :]).sum(-1)
    hidden = clamped_swiglu(gate_up, call.limit)
    result = (call.w2[local].float() * hidden[:, :, None, :]).sum(-1)
    total = torch.where(valid[:, :, None], result * call.weights[:, :, None], 0.0).sum(1)
    if call.shared_w13 is not None and call.shared_w2 is not None:
        hidden = clamped_swiglu((call.shared_w13.float() * x[:, None, :]).sum(-1), call.limit)
        total = total + (call.shared_w2.float() * hidden[:, None, :]).sum(-1)
    return total.to(call.x.dtype)


@lowers("moe_experts", can_lower, yields)
def lower(call: ExpertsArguments) -> Any:
    """Build the IR."""
    return lower_from_reference(by_place, *call)
