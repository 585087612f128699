"""End of hyper-connections on a CPU: post of the last sub-layer, then `y` of the kernel of `mhc_pre`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.hyper_connections import mhc_head as reference
from ...reference.hyper_connections.mhc_head import MhcHead
from .. import native
from ..common.invariant import before_sums_by_torch
from .mhc_post import mhc_post


def mhc_head(a: MhcHead) -> Tensor:
    """Compute the op of this name as its reference does, up to the order of sums."""
    streams = a.streams
    if a.output is not None and a.post is not None and a.comb is not None:
        streams = mhc_post(streams, a.output, a.post, a.comb)
    tensors = streams, a.fn, a.base, a.scale, a.norm_weight
    if native.takes(*tensors):
        tokens, count, dim = streams.shape
        y = torch.empty((tokens, dim), dtype=streams.dtype)
        settings = 0, float(a.norm_eps), float(a.hc_eps), torch.get_num_threads()
        native.call("mhc_pre", *tensors, y, None, None, tokens, count, dim, *settings)
        return y
    before_sums_by_torch()
    return reference.mhc_head(a._replace(streams=streams, output=None, post=None, comb=None))
