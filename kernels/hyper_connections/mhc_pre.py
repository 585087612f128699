"""`mhc_pre` by the kernels of `mhc_boundary`, which then read the streams and store none."""

from __future__ import annotations

from torch import Tensor

from ...ops.common.invariance import TOKENS
from .mhc_boundary import Mix, launch, why_unsupported


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
    """Run the op. The order of sums is not the reference's, which moves results by a rounding."""
    results = launch(streams, None, Mix(fn, base, scale, norm_weight, norm_eps, hc_eps, iterations))
    assert results.post is not None and results.comb is not None
    return results.y, results.post, results.comb


def invariant_mhc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int = 20,
    level: str = TOKENS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op with the sums of one launch for calls of any size."""
    mix = Mix(fn, base, scale, norm_weight, norm_eps, hc_eps, iterations)
    results = launch(streams, None, mix, invariant=level)
    assert results.post is not None and results.comb is not None
    return results.y, results.post, results.comb


def why_unsupported_mhc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int = 20,
) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    return why_unsupported(streams)
