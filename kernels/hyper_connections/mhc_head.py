"""`mhc_head` by the kernels of `mhc_boundary`, with 4 coefficients of a token instead of 24."""

from __future__ import annotations

from torch import Tensor

from ...ops.common.invariance import TOKENS
from ...reference.hyper_connections.mhc_head import MhcHead
from .mhc_boundary import Mix, launch, why_unsupported


def mhc_head(a: MhcHead) -> Tensor:
    """Run the op. The order of sums is not the reference's, which moves results by a rounding."""
    return _run(a)


def invariant_mhc_head(a: MhcHead, level: str = TOKENS) -> Tensor:
    """Run the op with the sums of one launch for calls of any size."""
    return _run(a, level)


def _run(a: MhcHead, invariant: str = "") -> Tensor:
    returned = None
    if a.output is not None and a.post is not None and a.comb is not None:
        returned = a.output, a.post, a.comb
    mix = Mix(a.fn, a.base, a.scale, a.norm_weight, a.norm_eps, a.hc_eps, 0)
    return launch(a.streams, returned, mix, invariant=invariant).y


def why_unsupported_mhc_head(a: MhcHead) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    return why_unsupported(a.streams)
