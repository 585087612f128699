"""Coefficients of hyper-connections alone, for models whose collapse is lagged: it takes `pre` of the site before."""

from __future__ import annotations

import torch
from torch import Tensor

from .mhc_pre import sinkhorn, stream_mix


def mhc_mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the coefficients of `mhc_pre` and mix nothing, so that a sub-layer may run at the same time.

    DeepSeek-V4.1 takes `post` and `comb` at their own site and `pre` at the next one (`mhc_collapse`).

    Args:
        streams, fn, base, scale, norm_eps, hc_eps, iterations: as in `mhc_pre`.
    Returns:
        float32 `pre [T, N]`, `post [T, N]` and `comb [T, N, N]`; contiguous.
    """
    count = streams.shape[1]
    pre, post, comb = stream_mix(streams, fn, norm_eps).split([count, count, count * count], 1)
    pre_base, post_base, comb_base = base.float().split([count, count, count * count])
    scale = scale.float()
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(1, (count, count)), hc_eps, iterations)
    return pre.contiguous(), post.contiguous(), comb.contiguous()
