"""Gate of the engram: how much of its value each stream of hyper-connections takes."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_DOT = 1e-6
"""Magnitude of the smallest dot product under the root."""


def engram_gate(
    streams: Tensor, keys_value: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, norm_eps: float
) -> Tensor:
    """Add `gate_n value` to each stream n, in float32, rounded once.

        dot_n = <norm(streams_n) q_weight_n, norm(key_n) k_weight_n> D^-0.5,   gate_n = sigmoid(sign(dot) sqrt(|dot|))

    Args:
        streams: `[T, N, D]` bfloat16, float16 or float32, any strides.
        keys_value: `[T, (N + 1) * D]`, a key for each stream and then the value.
        q_weight, k_weight: `[N, D]`, of the RMSNorms.
        is_image: bool `[T]`; image tokens take nothing.
    Returns:
        `[T, N, D]`, contiguous, in the dtype of streams.
    """
    count, dim = streams.shape[1:]
    wide, parts = streams.float(), keys_value.float().unflatten(1, (count + 1, dim))
    keys, value = parts[:, :count], parts[:, count:]
    products = wide * (q_weight.float() * k_weight.float()) * keys
    norms = torch.rsqrt(wide.square().mean(-1) + norm_eps) * torch.rsqrt(keys.square().mean(-1) + norm_eps)
    dot = products.sum(-1) * norms * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(SMALLEST_DOT).sqrt(), dot))
    gate = torch.where(is_image[:, None], 0.0, gate)
    return (wide + gate[..., None] * value).to(streams.dtype).contiguous()
