"""Schema, check and fake of `torch.ops.dsv4.grouped_linear`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...cpu.linear import grouped_linear as on_cpu
from ...errors import fail
from ...reference.linear import grouped_linear as reference
from ...selection.costs import FLOAT32, CallSizes, Cost, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from ..common.validate import FLOATS, describe, expect, expect_dim


def _check(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> None:
    op = "grouped_linear"
    expect(weight, f"{op}: weight [G * N, K]", FLOATS)
    if x.dtype is not weight.dtype or x.dim() not in (2, 3):
        fail("E201", got=describe(x), rule=f"{op}: x [T, G * K] or [T, G, K] has the dtype of weight")
    if groups < 1 or weight.shape[0] % groups != 0:
        fail("E201", got=f"{groups} groups, weight {describe(weight)}", rule=f"{op}: weight's rows divide into groups")
    if x.dim() == 3:
        expect_dim(x.shape[1], groups, f"{op}: x [T, G, K] has a row for every group")
        expect_dim(x.shape[2], weight.shape[1], f"{op}: the last dim of x is the K of weight")
    else:
        expect_dim(x.shape[1], groups * weight.shape[1], f"{op}: x [T, G * K] holds the K of weight for every group")


def _fake(x: Tensor, weight: Tensor, groups: int, float32: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if float32 else x.dtype)


def _cost_of_float32(call: CallSizes) -> list[Cost]:
    """Return the bytes that a float32 result adds to one in the dtype of x."""
    if not call.arguments.get("float32", False):
        return []
    rows, k = call.dims("weight")
    tokens = math.prod(call.dims("x")) // (k * call.arguments["groups"])
    return [Cost(tokens * rows * (FLOAT32 - call.size("x")), 0)]


grouped_linear = define(
    "grouped_linear",
    reference=reference.grouped_linear,
    fake=_fake,
    check=_check,
    on_cpu=on_cpu.grouped_linear,
    kernel="dsv4_compile.kernels.linear.grouped_linear",
    cost=CostModel(
        lambda T, G, N, K, e=2: (e * G * (T * (K + N) + N * K), 2 * T * G * N * K),
        sizes=lambda call: call.of_product("x", "weight"),
        added=_cost_of_float32,
    ),
    invariant=Invariance(rows=("x",), on_cpu=AS_IT_IS, kernel=PINNED),
)
