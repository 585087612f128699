"""Boundary between two sub-layers: the post of one and the pre of the next, in one op."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .mhc_post import mhc_post
from .mhc_pre import mhc_pre


class MhcBoundary(NamedTuple):
    """Arguments of `mhc_boundary`: those of `mhc_post` and `mhc_pre`, in schema order."""

    streams: Tensor
    output: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_weight: Tensor
    norm_eps: float
    hc_eps: float
    iterations: int = 20


def mhc_boundary(a: MhcBoundary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the new streams, and the outputs of `mhc_pre` for these streams as rounded.

    Args:
        a: streams, output, post and comb as `mhc_post` takes them, the others as `mhc_pre` does.
    Returns:
        The streams `[T, N, D]`, `y [T, D]`, float32 `post [T, N]` and `comb [T, N, N]`; contiguous.
    """
    streams = mhc_post(a.streams, a.output, a.post, a.comb)
    return streams, *mhc_pre(streams, *a[4:])
