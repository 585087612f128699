"""Collapse of the streams of hyper-connections into the normed input of a sub-layer, with given weights."""

from __future__ import annotations

from torch import Tensor

from .mhc_pre import mixed_input


def mhc_collapse(streams: Tensor, pre: Tensor, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """Return the RMSNorm of `sum_n pre[n] streams[n]`, which is rounded before and after the norm.

    Args:
        streams: `[T, N, D]` bfloat16, float16 or float32, any strides.
        pre: float32 `[T, N]`, in DeepSeek-V4.1 that of the site before, 1 and zeros before the first layer.
        norm_weight: `[D]`.
    Returns:
        `[T, D]`, contiguous, in the dtype of streams.
    """
    return mixed_input(streams, pre, norm_weight, norm_eps)
