"""Experts of DeepSeek-V4.1 one after the other, each with all of its tokens; others' weights are not read."""

from __future__ import annotations

from torch import Tensor

from ...reference.moe.moe_experts import local_experts
from ...reference.moe.mx_experts import MxExperts, expert_matrix, is_quantised, one_expert, shared_part


def mx_experts(call: MxExperts) -> Tensor:
    """Compute the op of this name as its reference does, up to the order of sums."""
    total, x = shared_part(call), call.x.float()
    (local, valid), quantize = local_experts(call), is_quantised(call, call.w13_scale)
    chosen = local.masked_fill(~valid, -1)
    for expert in chosen.unique().tolist():
        if expert >= 0:
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            w13, w2 = (
                expert_matrix(weight[expert], None if scale is None else scale[expert])
                for weight, scale in ((call.w13, call.w13_scale), (call.w2, call.w2_scale))
            )
            result = one_expert(call, x[tokens], call.weights[tokens, places], w13, w2, quantize=quantize)
            total.index_add_(0, tokens, result)
    return total.to(call.x.dtype)
