"""Experts one after the other, each with all of its tokens; the weight of an expert that no token takes is not read.

Places are sorted by expert, so that all but the two GEMMs of an expert is done for all of them at once. In the kernel
for few tokens, a token has the same bits in any batch; among more, GEMMs may sum in a different order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...reference.moe.expert_weights import dequantize_expert
from ...reference.moe.moe_experts import ExpertsArguments, clamped_swiglu, local_experts, shared_expert
from .. import native
from ..common.invariant import before_sums_by_torch, is_required
from ..linear.mm import mm

FEW_TOKENS = 64
"""Most tokens that are faster without GEMMs."""


def moe_experts(call: ExpertsArguments) -> Tensor:
    """Compute the op of this name as its reference does, up to the order of sums."""
    if _float32(call):
        return _in_kernel(call) if call.ids.shape[0] <= FEW_TOKENS or is_required() else _in_gemms(call)
    before_sums_by_torch()
    (tokens, top_k), x = call.ids.shape, call.x.float()
    counts, places = _sorted(call)
    hidden = _by_expert(call, "w13", x.index_select(0, places // top_k), counts)
    result = _by_expert(call, "w2", clamped_swiglu(hidden, call.limit), counts)
    result.mul_(call.weights.reshape(-1, 1).index_select(0, places))
    total = x.new_zeros((tokens * top_k, x.shape[1])).index_copy_(0, places, result)
    return (total.view(tokens, top_k, x.shape[1]).sum(1) + shared_expert(call, x)).to(call.x.dtype)


def _sorted(call: ExpertsArguments) -> tuple[list[int], Tensor]:
    """Return the number of places of each expert, and these places int64 `[P]`, an expert's after the other's."""
    experts = call.w13.shape[0]
    local, valid = local_experts(call)
    owner = local.masked_fill(~valid, experts).view(-1)
    counts = torch.bincount(owner, minlength=experts).tolist()[:experts]
    return counts, owner.argsort(stable=True)[: sum(counts)]


def _float32(call: ExpertsArguments) -> bool:
    """Return whether a kernel takes the call."""
    weights = call.w13, call.w2, call.shared_w13, call.shared_w2
    return native.takes(call.x, call.weights, *weights, int32=(call.ids,))


def _in_kernel(call: ExpertsArguments) -> Tensor:
    """Compute the op in a kernel, an expert at a time."""
    out = torch.empty(call.x.shape)
    shared = 0 if call.shared_w2 is None else call.shared_w2.shape[1]
    weights = call.w13, call.w2, call.shared_w13, call.shared_w2
    sizes = *call.ids.shape, call.w13.shape[0], call.first_expert, call.x.shape[1], call.w2.shape[2], shared
    settings = float(call.limit), torch.get_num_threads()
    native.call("moe_experts", call.x, call.ids, call.weights, *weights, out, *sizes, *settings)
    return out


def _in_gemms(call: ExpertsArguments) -> Tensor:
    """Compute the op of float32 tensors, two GEMMs an expert."""
    counts, places = _sorted(call)
    (tokens, dim), top_k = call.x.shape, call.ids.shape[1]
    rows, out = call.x.index_select(0, places // top_k), torch.zeros((tokens, dim))
    parts = zip(rows.split(counts), places.split(counts), call.w13.unbind(), call.w2.unbind(), strict=True)
    for x, expert_places, w13, w2 in parts:
        if x.shape[0] > 0:
            result = mm(_swiglu(mm(x, w13.t()), call.limit), w2.t())
            native.call("add_rows", result, expert_places, call.weights, out, *x.shape, top_k)
    if call.shared_w13 is not None and call.shared_w2 is not None:
        out += mm(_swiglu(mm(call.x, call.shared_w13.t()), call.limit), call.shared_w2.t())
    return out


def _swiglu(x: Tensor, limit: float) -> Tensor:
    """Return `[T, I]` of gate and up `[T, 2 * I]`, float32."""
    out = torch.empty((x.shape[0], x.shape[1] // 2))
    native.call("clamped_swiglu", x, out, *out.shape, float(limit), torch.get_num_threads())
    return out


def _by_expert(call: ExpertsArguments, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return float32 `[P, N]`: each of the `rows` `[P, K]` times the weight of its expert, which has `counts` rows."""
    weight, scale = getattr(call, name), getattr(call, f"{name}_scale")
    out, start = rows.new_empty((rows.shape[0], weight.shape[1])), 0
    for expert, count in enumerate(counts):
        if count > 0:
            matrix = dequantize_expert(weight[expert], None if scale is None else scale[expert], call.interleaved)
            torch.mm(rows[start : start + count], matrix.t(), out=out[start : start + count])
            start += count
    return out
