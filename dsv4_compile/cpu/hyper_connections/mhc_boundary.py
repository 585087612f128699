"""Boundary between two sub-layers: post of one and pre of the next, each in its form for CPUs."""

from __future__ import annotations

from torch import Tensor

from ...reference.hyper_connections.mhc_boundary import MhcBoundary
from .mhc_post import mhc_post
from .mhc_pre import mhc_pre


def mhc_boundary(a: MhcBoundary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op of this name as its reference does, up to the order of sums and the rounding of sigmoid."""
    streams = mhc_post(a.streams, a.output, a.post, a.comb)
    return streams, *mhc_pre(streams, *a[4:])
