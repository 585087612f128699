"""Coefficients of manifold-constrained hyper-connections (mHC), and the input of a sub-layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..preprocess.fused_q_kv_rmsnorm import rms_norm


def mhc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the streams into the normed input of a sub-layer, and compute how its output returns to the streams.

    `mix = streams fn^T rsqrt(mean(streams^2) + norm_eps)`, one mean for all streams of a token, gives
    `pre = sigmoid(mix * scale[0] + base) + hc_eps`, `post = 2 sigmoid(mix * scale[1] + base)` and the logits of `comb`,
    `mix * scale[2] + base`. A Sinkhorn iteration makes `comb` nearly doubly stochastic. All in float32.

    Args:
        streams: `[T, N, D]`, bfloat16, float16 or float32, any strides.
        fn: `[(N + 2) * N, N * D]`, the rows of pre, of post and of comb; base: `[(N + 2) * N]`; scale: `[3]`.
        norm_weight: `[D]`, of the RMSNorm of `sum_n pre[n] streams[n]`, which is rounded before.
        hc_eps: added to pre, to the softmax of comb, and to every sum that comb is divided by.
        iterations: of Sinkhorn's, rows then columns; the softmax is the first row step. At least 1.
    Returns:
        `y [T, D]` in the dtype of streams, float32 `post [T, N]` and `comb [T, N, N]`; contiguous.
    """
    count = streams.shape[1]
    pre, post, comb = stream_mix(streams, fn, norm_eps).split([count, count, count * count], 1)
    pre_base, post_base, comb_base = base.float().split([count, count, count * count])
    scale = scale.float()
    y = mixed_input(streams, torch.sigmoid(pre * scale[0] + pre_base) + hc_eps, norm_weight, norm_eps)
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(1, (count, count)), hc_eps, iterations)
    return y, post.contiguous(), comb.contiguous()


def stream_mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Return float32 `[T, rows of fn]`: the streams of each token, with one RMS norm for all of them, times `fn`."""
    flat = streams.float().flatten(1)
    return (flat @ fn.float().t()) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)


def mixed_input(streams: Tensor, pre: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Return `[T, D]`: the streams weighted with `pre` `[T, N]`, rounded, normed, and rounded again."""
    mixed = (pre.unsqueeze(2) * streams.float()).sum(1).to(streams.dtype)
    return rms_norm(mixed, eps, norm_weight).to(streams.dtype).contiguous()


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Return float32 `[T, N, N]`: positive matrices. Columns have the sum 1, rows nearly."""
    comb = torch.softmax(logits, 2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb
