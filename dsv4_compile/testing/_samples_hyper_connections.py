"""Samples of the hyper-connection ops. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ._samples_step import EPS, TOKENS, Args, Step, sample

STREAMS, DIM = 4, 80
F32 = torch.float32


def _streams(s: Step, count: int = STREAMS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return s.randn(TOKENS, count, DIM, dtype=dtype)


def _mix(s: Step, count: int = STREAMS, rows: int = 0, scales: int = 3) -> Args:
    """fn, base, scale, norm_weight and both eps."""
    rows = rows or (count + 2) * count
    fn = s.randn(rows, count * DIM, dtype=F32) / 8
    return fn, s.randn(rows, dtype=F32), s.randn(scales, dtype=F32), 1 + s.randn(DIM, dtype=F32) / 8, EPS, EPS


def _returned(s: Step, count: int = STREAMS, dtype: torch.dtype = torch.bfloat16) -> Args:
    """Output, post and comb of a sub-layer."""
    return (
        s.randn(TOKENS, DIM, dtype=dtype),
        2 * torch.sigmoid(s.randn(TOKENS, count, dtype=F32)),
        torch.softmax(s.randn(TOKENS, count, count, dtype=F32), 1),
    )


@sample
def mhc_pre(s: Step) -> list[Args]:
    """Four streams; three in float32 with their dims swapped in memory, and few iterations; no token; one."""
    streams, swapped = _streams(s), _streams(s, 3, F32).transpose(0, 1).contiguous().transpose(0, 1)
    mix = _mix(s)
    return [(streams, *mix), (swapped, *_mix(s, 3), 2), (streams[:0], *mix), (streams[:1], *mix, 1)]


@sample
def mhc_post(s: Step) -> list[Args]:
    """Four streams; three in float32, and an output that is padded in memory; no token."""
    streams, returned = _streams(s), _returned(s)
    _, post, comb = _returned(s, 3)
    padded = s.randn(TOKENS, DIM + 8, dtype=F32)[:, :DIM]
    none = tuple(x[:0] for x in (streams, *returned))
    return [(streams, *returned), (_streams(s, 3, F32), padded, post, comb), none]


@sample
def mhc_boundary(s: Step) -> list[Args]:
    """Four streams; three in float32; no token; one."""
    streams, returned, mix = _streams(s), _returned(s), _mix(s)
    few = [tuple(x[:count] for x in (streams, *returned)) for count in (0, 1)]
    wide = (_streams(s, 3, F32), *_returned(s, 3, F32), *_mix(s, 3), 3)
    return [(streams, *returned, *mix), wide, *((*args, *mix) for args in few)]


@sample
def mhc_head(s: Step) -> list[Args]:
    """Four streams after a sub-layer and as they are; three in float32; no token."""
    streams, returned, mix = _streams(s), _returned(s), _mix(s, rows=STREAMS, scales=1)
    wide = (_streams(s, 3, F32), *_mix(s, 3, rows=3, scales=1), *_returned(s, 3, F32))
    return [(streams, *mix, *returned), (streams, *mix), wide, (streams[:0], *mix)]
