"""Coefficients of hyper-connections with few calls of torch: all in one row, and Sinkhorn iterations in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.hyper_connections.mhc_pre import mixed_input, stream_mix
from .. import native
from ..common.invariant import before_sums_by_torch


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
    """Compute the op of this name as its reference does, up to the order of sums and the rounding of sigmoid.

    In the kernel, a token has the same bits in any batch.
    """
    tokens, count, dim = streams.shape
    tensors = streams, fn, base, scale, norm_weight
    if native.takes(*tensors):
        results = [torch.empty(shape) for shape in ((tokens, dim), (tokens, count), (tokens, count, count))]
        settings = iterations, float(norm_eps), float(hc_eps), torch.get_num_threads()
        native.call("mhc_pre", *tensors, *results, tokens, count, dim, *settings)
        return results[0], results[1], results[2]
    before_sums_by_torch()
    sizes = [count, count, count * count]
    mix = stream_mix(streams, fn, norm_eps)
    for columns, factor in zip(mix.split(sizes, 1), scale.float().unbind(), strict=True):
        columns.mul_(factor)
    mix += base.float()
    pre, post, logits = mix.split(sizes, 1)
    y = mixed_input(streams, pre.sigmoid().add_(hc_eps), norm_weight, norm_eps)
    return y, post.sigmoid().mul_(2), _sinkhorn(logits.unflatten(1, (count, count)), hc_eps, iterations)


def _sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Return the reference's matrices float32 `[T, N, N]`, contiguous."""
    comb = torch.softmax(logits, 2).add_(eps)
    sums = comb.new_empty((comb.shape[0], 1, comb.shape[2])), comb.new_empty((*comb.shape[:2], 1))
    for step in range(2 * iterations - 1):
        dim = 1 + step % 2  # columns first: the softmax was the first row step
        comb.div_(torch.sum(comb, dim, keepdim=True, out=sums[dim - 1]).add_(eps))
    return comb
