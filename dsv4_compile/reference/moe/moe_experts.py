"""The experts of a mixture: gate and up, clamp, SwiGLU, down, and the sum of a token's experts by its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...layout import cdiv
from .expert_weights import dequantize_expert


class ExpertsArguments(NamedTuple):
    """Arguments of `moe_experts`, in schema order.

    Attributes:
        x: `[T, D]` bfloat16, float16 or float32, any strides.
        ids: int `[T, K]`, an expert for each place of a token. Ids outside `first_expert` to `first_expert + E` add
            nothing: they are padding, or experts of other ranks.
        weights: float32 `[T, K]`.
        w13: `[E, 2 I, D]`, the rows of gate (w1) before those of up (w3); w2: `[E, D, I]`. Floating, or quantised with
            scales: e4m3 with float32, float8_e8m0fnu or uint8 UE8M0 scales `[E, ceil(N/128), ceil(K/128)]`, or MXFP4,
            bytes `[E, N, K/2]` with float8_e8m0fnu or uint8 scales `[E, N, K/32]`. Kernels may read them before the
            previous kernel has ended, so no weight is a result of the same step.
        w13_scale, w2_scale: scales of quantised weights.
        shared_w13, shared_w2: `[2 Is, D]` and `[D, Is]`, an expert that every token takes with weight 1, in any of the
            formats; shared_w13_scale, shared_w2_scale: its scales.
        limit: gate is clamped to at most `limit`, up to `-limit` to `limit`.
        first_expert: id of the first expert of w13 and w2.
        interleaved: MXFP4 weights of the routed experts are in the order of `expert_weights.interleave_`.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    shared_w13: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_w13_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    limit: float = 10.0
    first_expert: int = 0
    interleaved: bool = False


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 `[..., 2 I]`, gate before up."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Routed(Protocol):
    """Arguments with routed experts."""

    @property
    def ids(self) -> Tensor:
        """Int `[T, K]`."""

    @property
    def weights(self) -> Tensor:
        """Float32 `[T, K]`."""

    @property
    def w13(self) -> Tensor:
        """Weights of `E` experts."""

    @property
    def first_expert(self) -> int:
        """Id of the first of them."""


def local_experts(call: Routed) -> tuple[Tensor, Tensor]:
    """Return int64 `[T, K]` row of w13 and w2 for each place, 0 where it has none, and which places have one."""
    local = call.ids.long() - call.first_expert
    valid = (local >= 0) & (local < call.w13.shape[0])
    return torch.where(valid, local, 0), valid


def moe_experts(call: ExpertsArguments) -> Tensor:
    """Add the experts of each token up, all in float32 on dequantised weights, and round once.

    Returns:
        `[T, D]`, contiguous, in x's dtype.
    """
    x = call.x.float()

    def expert(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        w13, w2 = (
            dequantize_expert(weight.index_select(0, index)[0], one_scale(scale, index), call.interleaved)
            for weight, scale in ((call.w13, call.w13_scale), (call.w2, call.w2_scale))
        )
        return clamped_swiglu(rows @ w13.t(), call.limit) @ w2.t() * weights[:, None]

    return (sum_of_experts(call, x, expert) + shared_expert(call, x)).to(call.x.dtype)


def sum_of_experts(call: Routed, x: Tensor, expert: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return float32 `[T, D]`: for each token of float32 `x`, the sum of what its experts give.

    Places are sorted by expert and split into tiles of one expert. There are as many tiles as there may have to be, so
    nothing depends on values. A weight is dequantised for one tile at a time.

    Args:
        call: with ids, weights, w13 and first_expert.
        expert: of rows `[n, D]`, the expert's index int64 `[1]`, and the rows' weights `[n]`; returns `[n, D]`.
    """
    tokens, top_k = call.ids.shape
    experts, places = call.w13.shape[0], tokens * top_k
    local, valid = local_experts(call)
    order = torch.where(valid, local, experts).flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, device=x.device)
    starts = torch.searchsorted(order.values, bounds)
    size = 1 if places <= experts else cdiv(places, experts)
    tiles = (starts[1:] - starts[:-1] + size - 1) // size
    ends = tiles.cumsum(0)
    # The last row takes what belongs to no place.
    out = x.new_zeros((places + 1, x.shape[1]))
    for tile in range(places if size == 1 else places // size + experts):
        index = torch.full((1,), tile, device=x.device)
        number = torch.searchsorted(ends, index, right=True).clamp(max=experts - 1)
        first = starts[number] + (tile - ends[number] + tiles[number]) * size
        position = first + torch.arange(size, device=x.device)
        live = (position < starts[number + 1]) & (index < ends[-1:])
        slots = order.indices.index_select(0, torch.where(live, position, 0))
        weights = call.weights.reshape(-1).index_select(0, slots)
        result = expert(x.index_select(0, slots // top_k), number, weights)
        out.index_copy_(0, torch.where(live, slots, places), result)
    return out[:places].view(tokens, top_k, x.shape[1]).sum(1)


def shared_expert(call: ExpertsArguments, x: Tensor) -> Tensor | float:
    """Return what the shared expert adds to float32 `x`, 0 if there is none."""
    if call.shared_w13 is None or call.shared_w2 is None:
        return 0.0
    hidden = clamped_swiglu(x @ dequantize_expert(call.shared_w13, call.shared_w13_scale).t(), call.limit)
    return hidden @ dequantize_expert(call.shared_w2, call.shared_w2_scale).t()


def one_scale(scale: Tensor | None, expert: Tensor) -> Tensor | None:
    """Return the scales of one expert."""
    if scale is None:
        return None
    # torch selects no rows of float8_e8m0fnu.
    byte = scale.view(torch.uint8) if scale.dtype is torch.float8_e8m0fnu else scale
    return byte.index_select(0, expert)[0]
