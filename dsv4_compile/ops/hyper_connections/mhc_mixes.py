"""`torch.ops.dsv4.mhc_mixes`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.hyper_connections import mhc_mixes as reference
from ...selection.costs import FLOAT32, CallSizes, CostModel
from ..common.define import define
from ..common.validate import FLOATS, expect, expect_dim
from .mhc_pre import coefficients

_OP = "mhc_mixes"


def _check(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int = 20
) -> None:
    expect(streams, f"{_OP}: streams [T, N, D]", FLOATS)
    count, dim = streams.shape[1:]
    expect(fn, f"{_OP}: fn [M, N * D]", FLOATS)
    expect(base, f"{_OP}: base [M]", FLOATS)
    expect(scale, f"{_OP}: scale [3]", FLOATS)
    expect_dim(fn.shape[0], (count + 2) * count, f"{_OP}: fn has a row for each coefficient")
    expect_dim(fn.shape[1], count * dim, f"{_OP}: fn covers all streams")
    expect_dim(base.shape[0], fn.shape[0], f"{_OP}: base has an element for each coefficient")
    expect_dim(scale.shape[0], 3, f"{_OP}: scale has an element for each kind of coefficient")
    check(iterations >= 1, "E201", got=f"{_OP}: iterations={iterations}", rule="at least 1")


def _fake(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, count, _ = streams.shape
    rows = streams.new_empty((tokens, count), dtype=torch.float32)
    return rows, torch.empty_like(rows), streams.new_empty((tokens, count, count), dtype=torch.float32)


mhc_mixes = define(
    _OP,
    reference=reference.mhc_mixes,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.hyper_connections.mhc_mixes",
    cost=CostModel(
        lambda T, D, G, e=2: (
            T * (e * G * D + FLOAT32 * G + coefficients(G)) + FLOAT32 * ((G + 2) * G * (G * D + 1) + 3),
            2 * T * (G + 2) * G * G * D,
        ),
        sizes=CallSizes.of_streams,
    ),
)
