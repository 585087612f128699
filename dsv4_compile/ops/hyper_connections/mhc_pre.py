"""`torch.ops.dsv4.mhc_pre`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cpu.hyper_connections import mhc_pre as cpu
from ...errors import check
from ...reference.hyper_connections import mhc_pre as reference
from ...selection.costs import FLOAT32, CallSizes, CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from ..common.validate import FLOATS, expect, expect_dim

FEW_LAUNCHES = "the kernel computes all coefficients in one launch or two"


def check_mix(
    op: str, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, outputs: int, scales: int
) -> None:
    """Raise E201 unless `fn` has `outputs` rows for `streams`, and base, scale and norm_weight fit."""
    expect(streams, f"{op}: streams [T, N, D]", FLOATS)
    count, dim = streams.shape[1:]
    expect(fn, f"{op}: fn [M, N * D]", FLOATS)
    expect(base, f"{op}: base [M]", FLOATS)
    expect(scale, f"{op}: scale [{scales}]", FLOATS)
    expect(norm_weight, f"{op}: norm_weight [D]", FLOATS)
    expect_dim(fn.shape[0], outputs, f"{op}: fn has a row for each coefficient")
    expect_dim(fn.shape[1], count * dim, f"{op}: fn covers all streams")
    expect_dim(base.shape[0], outputs, f"{op}: base has an element for each coefficient")
    expect_dim(scale.shape[0], scales, f"{op}: scale has an element for each kind of coefficient")
    expect_dim(norm_weight.shape[0], dim, f"{op}: norm_weight covers the last dim of streams")


def check_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int = 20,
    op: str = "mhc_pre",
) -> None:
    """Raise E201 where the arguments of `mhc_pre`, on behalf of `op`, are wrong."""
    count = streams.shape[1] if streams.dim() > 1 else 0
    check_mix(op, streams, fn, base, scale, norm_weight, (count + 2) * count, 3)
    check(iterations >= 1, "E201", got=f"{op}: iterations={iterations}", rule="at least 1")


def fake_pre(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of `mhc_pre`."""
    tokens, count, dim = streams.shape
    return (
        streams.new_empty((tokens, dim)),
        streams.new_empty((tokens, count), dtype=torch.float32),
        streams.new_empty((tokens, count, count), dtype=torch.float32),
    )


def _fake(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_pre(streams)


def coefficients(G: Any) -> Any:
    """Return the bytes of the coefficients of a token with `G` streams."""
    return FLOAT32 * (G + G * G)


def mix(G: Any, D: Any) -> Any:
    """Return the bytes of the float32 weights that mix `G` streams of `D` channels."""
    return FLOAT32 * ((G + 2) * G * (G * D + 1) + 3 + D)


mhc_pre = define(
    "mhc_pre",
    reference=reference.mhc_pre,
    on_cpu=cpu.mhc_pre,
    fake=_fake,
    check=check_pre,
    kernel="dsv4_compile.kernels.hyper_connections.mhc_pre",
    lowering=Traced(static=("streams",), yields=FEW_LAUNCHES),
    cost=CostModel(
        lambda T, D, G, e=2: (T * (e * (G + 1) * D + coefficients(G)) + mix(G, D), 2 * T * (G + 2) * G * G * D),
        sizes=CallSizes.of_streams,
    ),
    invariant=Invariance(rows=("streams",), on_cpu=AS_IT_IS, kernel=PINNED),
)
