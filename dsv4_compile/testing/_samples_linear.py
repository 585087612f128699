"""Samples of the linear layers that are ops. See samples.py."""

from __future__ import annotations

from ._samples_step import TOKENS, Args, Step, sample


@sample
def grouped_linear(s: Step) -> list[Args]:
    x, weight = s.randn(TOKENS, 3, 80), s.randn(3 * 20, 80)
    single = x.float().transpose(0, 1).contiguous().transpose(0, 1)
    rounded = [(x.flatten(1), weight, 3), (x, weight, 3), (single, weight.float(), 3), (x[:0], weight, 3)]
    return [*rounded, (x, weight, 3, True)]
