"""A linear layer that is one matrix per group of its input, as the first output projection of DeepSeek-V4."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """`y[t, g * N + n] = sum_k x[t, g, k] * weight[g * N + n, k]`, float32 sums in any order, one rounding.

    Args:
        x: bfloat16, float16 or float32, `[T, G * K]` or `[T, G, K]`, any strides.
        weight: x's dtype, `[G * N, K]`, a group's rows together.
        groups: G.
    Returns:
        Contiguous `[T, G * N]` in x's dtype.
    """
    tokens, size = x.shape[0], weight.shape[1]
    out = x.new_empty((tokens, groups, weight.shape[0] // groups))
    # The product is written where it belongs: [G, T, N] with the strides of [T, G, N].
    by_group = x.reshape(tokens, groups, size).transpose(0, 1)
    torch.bmm(by_group, weight.reshape(groups, -1, size).transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
