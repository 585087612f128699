"""The experts of DeepSeek-V4.1: MXFP4 routed experts and an e4m3 shared one with scales of 32x32 blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import MX_TILE
from ..common.block_scale import dequantize_weight
from ..common.quant import dequantize_mxfp4
from ..linear.mx_linear import rounded_input
from .expert_weights import weight_format
from .moe_experts import clamped_swiglu, one_scale, sum_of_experts


class MxExperts(NamedTuple):
    """Arguments of `mx_experts`, in schema order.

    Attributes:
        x: `[T, D]` bfloat16, float16 or float32, any strides.
        ids: int `[T, K]`; ids outside `first_expert` to `first_expert + E` add nothing.
        weights: float32 `[T, K]`.
        w13: `[E, 2 I, D]`, the rows of gate (w1) before those of up (w3); w2: `[E, D, I]`. Floating, or MXFP4 bytes
            `[E, N, K/2]` with UE8M0 scales `[E, N, K/32]` (float8_e8m0fnu or uint8).
        shared_w13, shared_w2: `[2 Is, D]` and `[D, Is]`, an expert of every token with weight 1. Floating, or e4m3 with
            scales `[ceil(N/32), ceil(K/32)]`.
        w13_scale, w2_scale, shared_w13_scale, shared_w2_scale: scales of quantised weights.
        limit: gate is clamped to at most `limit`, up to `-limit` to `limit`, the shared expert's too.
        first_expert: id of the first expert of w13 and w2.
        quantize_input: round the inputs of quantised weights to mxfp8, as DeepSeek's own kernels do.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    shared_w13_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    limit: float = 10.0
    first_expert: int = 0
    quantize_input: bool = False


def mx_experts(call: MxExperts) -> Tensor:
    """Add the experts of each token up in float32, and round once.

    Gate and up are rounded to x's dtype; their product with the routing weight is rounded once before the down GEMM,
    and so is its result.

    Returns:
        `[T, D]`, contiguous, in x's dtype.
    """

    def expert(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        matrices = [
            expert_matrix(weight.index_select(0, index)[0], one_scale(scale, index))
            for weight, scale in ((call.w13, call.w13_scale), (call.w2, call.w2_scale))
        ]
        return one_expert(call, rows, weights, *matrices, quantize=is_quantised(call, call.w13_scale))

    return (sum_of_experts(call, call.x.float(), expert) + shared_part(call)).to(call.x.dtype)


def is_quantised(call: MxExperts, scale: Tensor | None) -> bool:
    """Return whether inputs of weights with this scale are rounded to mxfp8."""
    return call.quantize_input and scale is not None


def shared_part(call: MxExperts) -> Tensor:
    """Return float32 `[T, D]`, the result of the shared expert."""
    w13 = expert_matrix(call.shared_w13, call.shared_w13_scale)
    w2 = expert_matrix(call.shared_w2, call.shared_w2_scale)
    ones = torch.ones((), device=call.x.device).expand(call.x.shape[0])
    return one_expert(call, call.x.float(), ones, w13, w2, quantize=is_quantised(call, call.shared_w13_scale))


def one_expert(call: MxExperts, rows: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *, quantize: bool) -> Tensor:
    """Return float32 `[n, D]` of one expert with float32 weights, for rows `[n, D]` and routing weights `[n]`."""
    dtype = call.x.dtype
    gate_up = (rounded_input(rows, quantize) @ w13.t()).to(dtype).float()
    hidden = (clamped_swiglu(gate_up, call.limit) * weights[:, None]).to(dtype).float()
    return (rounded_input(hidden, quantize) @ w2.t()).to(dtype).float()


def expert_matrix(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a weight `[N, K]` in float32."""
    if scale is None:
        return weight.float()
    if weight_format(weight) == "mxfp4":
        return dequantize_mxfp4(weight.view(torch.uint8), scale.view(torch.uint8))
    return dequantize_weight(weight, scale, MX_TILE)
