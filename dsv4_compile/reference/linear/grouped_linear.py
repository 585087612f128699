"""A linear layer that is one matrix per group of its input, as the first output projection of DeepSeek-V4."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    """`y[t, g * N + n] = sum_k x[t, g, k] * weight[g * N + n, k]`, float32 sums in any order, one rounding.

    Args:
        x: bfloat16, float16 or float32, `[T, G * K]` or `[T, G, K]`, any strides.
        weight: x's dtype, `[G * N, K]`, a group's rows together. Never a result of the same step: Hopper's kernels may
            read it before those in front of them have ended.
        groups: G.
        float32: do not round.
    Returns:
        Contiguous `[T, G * N]` in x's dtype, or in float32.
    """
    tokens, size = x.shape[0], weight.shape[1]
    by_group = x.reshape(tokens, groups, size).transpose(0, 1)
    matrices = weight.reshape(groups, -1, size).transpose(1, 2)
    if float32 and x.dtype is not torch.float32:
        if x.is_cuda:
            return torch.bmm(by_group, matrices, out_dtype=torch.float32).transpose(0, 1).flatten(1)
        # Products of two bfloat16 values are exact in float32, so widening first changes the order of sums alone.
        return torch.bmm(by_group.float(), matrices.float()).transpose(0, 1).flatten(1)
    out = x.new_empty((tokens, groups, weight.shape[0] // groups))
    # The product is written where it belongs: [G, T, N] with the strides of [T, G, N].
    torch.bmm(by_group, matrices, out=out.transpose(0, 1))
    return out.flatten(1)
