"""End of hyper-connections: the streams become one normed vector for the output head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .mhc_post import mhc_post
from .mhc_pre import mixed_input, stream_mix


class MhcHead(NamedTuple):
    """Arguments of `mhc_head` in schema order; the last three are those of the last sub-layer's `mhc_post`."""

    streams: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_weight: Tensor
    norm_eps: float
    hc_eps: float
    output: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None


def mhc_head(a: MhcHead) -> Tensor:
    """Mix the streams, with weights `sigmoid(mix * scale + base) + hc_eps`, and apply the last RMSNorm.

    Args:
        a: `fn` is `[N, N * D]`, `base` `[N]`, `scale` `[1]`; streams, norm_weight, norm_eps and hc_eps as in `mhc_pre`.
            With output, post and comb, which are given together, `mhc_post` comes first.
    Returns:
        `[T, D]`, contiguous, in the dtype of streams.
    """
    streams = a.streams
    if a.output is not None and a.post is not None and a.comb is not None:
        streams = mhc_post(streams, a.output, a.post, a.comb)
    mix = stream_mix(streams, a.fn, a.norm_eps)
    pre = torch.sigmoid(mix * a.scale.float() + a.base.float()) + a.hc_eps
    return mixed_input(streams, pre, a.norm_weight, a.norm_eps)
