"""`torch.ops.dsv4.mhc_collapse`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.hyper_connections import mhc_collapse as reference
from ...selection.costs import FLOAT32, CallSizes, CostModel
from ..common.define import define
from ..common.validate import FLOATS, expect, expect_dim

_OP = "mhc_collapse"


def _check(streams: Tensor, pre: Tensor, norm_weight: Tensor, norm_eps: float) -> None:
    expect(streams, f"{_OP}: streams [T, N, D]", FLOATS)
    expect(pre, f"{_OP}: pre [T, N]", torch.float32)
    expect(norm_weight, f"{_OP}: norm_weight [D]", FLOATS)
    tokens, count, dim = streams.shape
    expect_dim(pre.shape[0], tokens, f"{_OP}: pre and streams have the same tokens")
    expect_dim(pre.shape[1], count, f"{_OP}: pre has a weight for each stream")
    expect_dim(norm_weight.shape[0], dim, f"{_OP}: norm_weight covers the last dim of streams")


def _fake(streams: Tensor, pre: Tensor, norm_weight: Tensor, norm_eps: float) -> Tensor:
    return streams.new_empty((streams.shape[0], streams.shape[2]))


mhc_collapse = define(
    _OP,
    reference=reference.mhc_collapse,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.hyper_connections.mhc_collapse",
    cost=CostModel(
        lambda T, D, G, e=2: (T * (e * (G + 1) * D + FLOAT32 * G) + FLOAT32 * D, 0),
        sizes=CallSizes.of_streams,
    ),
)
