"""Pooling of pairs of tokens into compressed latents: the compressor of ratio 2 of DeepSeek-V4.1."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import paging
from .fused_q_kv_rmsnorm import rms_norm

RATIO = 2


def compress_pairs(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    positions: Tensor,
    requests: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> Tensor:
    """Pool tokens 2j and 2j + 1 with softmax weights for each channel, round, and apply an RMSNorm.

    A latent ends at a token of odd position. Its even token is the row before, if that is the position before of the
    same request, else the row of `state`, which is read before it is written. Tokens of a request are consecutive rows
    with ascending positions. Of a step with more tokens than `state` has rows, the last are kept.

    Args:
        values, gates: float32 `[T, D]`, any strides.
        state: float32 `[R, S, 2 * D]`, values and then gates of the position `p` in row `p % S` of its request.
            Unused rows may hold NaN.
        positions, requests: int `[T]`; negative for padding, which reads and writes nothing.
        norm_weight: `[D]`, in the dtype that pooled values are rounded to.
    Returns:
        `[T, D]`, contiguous, in the dtype of norm_weight: latents, not rotated, zeros at even positions and padding.
    """
    tokens, rows = positions.shape[0], state.shape[1]
    inputs = torch.cat((values, gates), 1)
    if tokens == 0:
        return values.new_empty(values.shape, dtype=norm_weight.dtype)
    positions, requests = positions.long(), requests.long()
    live = (positions >= 0) & (requests >= 0) & (requests < state.shape[0])
    request, position = torch.where(live, requests, 0), torch.where(live, positions, 0)
    row = torch.arange(tokens, device=values.device)
    last = (row - 1).clamp_min(0)
    follows = (row > 0) & live[last] & (requests[last] == requests) & (positions[last] == positions - 1)
    noted = state[request, (position - 1) % rows] if state.shape[0] else torch.zeros_like(inputs)
    even = torch.where(follows[:, None], inputs[last], noted)
    _store(state, request, position, live, inputs)
    (even_values, even_gates), odd = even.chunk(2, 1), inputs.chunk(2, 1)
    weights = torch.softmax(torch.stack((even_gates, odd[1])), 0)
    pooled = (weights * torch.stack((even_values, odd[0]))).sum(0).to(norm_weight.dtype)
    latent = rms_norm(pooled, norm_eps, norm_weight).to(norm_weight.dtype)
    ends = live & (position % RATIO == 1)
    return torch.where(ends[:, None], latent, torch.zeros((), dtype=latent.dtype, device=latent.device)).contiguous()


def _store(state: Tensor, request: Tensor, position: Tensor, live: Tensor, inputs: Tensor) -> None:
    """Write the inputs of the last tokens of each request, as many as it has rows."""
    if state.shape[0] == 0:
        return
    newest = torch.full((state.shape[0],), -1, dtype=torch.long, device=state.device)
    newest = newest.scatter_reduce(0, request, torch.where(live, position, -1), "amax")
    keep = live & (position > newest[request] - state.shape[1])
    paging.write_rows(state, (request, position % state.shape[1]), inputs, keep)
