"""`torch.ops.dsv4.compress_pairs`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.preprocess import compress_pairs as reference
from ...selection.costs import FLOAT32, INT64, CostModel
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim
from ..common.validate_batch import expect_positive

_OP = "compress_pairs"


def _check(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    positions: Tensor,
    requests: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> None:
    expect(values, f"{_OP}: values [T, D]", torch.float32)
    expect(gates, f"{_OP}: gates [T, D]", torch.float32)
    expect(state, f"{_OP}: state [R, S, 2 * D]", torch.float32)
    expect(positions, f"{_OP}: positions [T]", INTS)
    expect(requests, f"{_OP}: requests [T]", INTS)
    expect(norm_weight, f"{_OP}: norm_weight [D]", FLOATS)
    tokens, dim = values.shape
    for name, tensor in (("gates", gates), ("positions", positions), ("requests", requests)):
        expect_dim(tensor.shape[0], tokens, f"{_OP}: {name} and values have the same tokens")
    expect_dim(gates.shape[1], dim, f"{_OP}: gates have the channels of values")
    expect_dim(state.shape[2], 2 * dim, f"{_OP}: a row of state holds values and gates")
    expect_dim(norm_weight.shape[0], dim, f"{_OP}: norm_weight covers the channels")
    expect_positive(_OP, **{"rows of state": state.shape[1]})


def _fake(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    positions: Tensor,
    requests: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> Tensor:
    return values.new_empty(values.shape, dtype=norm_weight.dtype)


compress_pairs = define(
    _OP,
    mutates=("state",),
    reference=reference.compress_pairs,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.preprocess.compress_pairs",
    cost=CostModel(
        lambda T, D, e=4: (T * (5 * FLOAT32 * D + e * D + 2 * INT64) + e * D, 0),
        sizes=lambda call: call.of_rows("values") | {"e": call.size("norm_weight")},
    ),
)
