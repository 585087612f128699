"""`torch.ops.dsv4.engram_gate`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.engram import engram_gate as reference
from ...selection.costs import CallSizes, CostModel
from ..common.define import define
from ..common.validate import FLOATS, expect, expect_dim

_OP = "engram_gate"


def _check(
    streams: Tensor, keys_value: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, norm_eps: float
) -> None:
    expect(streams, f"{_OP}: streams [T, N, D]", FLOATS)
    expect(keys_value, f"{_OP}: keys_value [T, (N + 1) * D]", FLOATS)
    expect(is_image, f"{_OP}: is_image [T]", torch.bool)
    tokens, count, dim = streams.shape
    expect_dim(keys_value.shape[0], tokens, f"{_OP}: keys_value and streams have the same tokens")
    expect_dim(keys_value.shape[1], (count + 1) * dim, f"{_OP}: keys_value holds a key for each stream and a value")
    expect_dim(is_image.shape[0], tokens, f"{_OP}: is_image and streams have the same tokens")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        expect(weight, f"{_OP}: {name} [N, D]", FLOATS)
        expect_dim(weight.shape[0], count, f"{_OP}: {name} has a row for each stream")
        expect_dim(weight.shape[1], dim, f"{_OP}: {name} covers the last dim of streams")


def _fake(
    streams: Tensor, keys_value: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, norm_eps: float
) -> Tensor:
    return streams.new_empty(streams.shape)


engram_gate = define(
    _OP,
    reference=reference.engram_gate,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.engram.engram_gate",
    cost=CostModel(
        lambda T, D, G, e=2: (e * T * D * (3 * G + 1) + 2 * e * G * D + T, 0),
        sizes=CallSizes.of_streams,
    ),
)
