"""Schema, check and fake of `torch.ops.dsv4.fp8_linear`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...cpu.linear import fp8_linear as on_cpu
from ...errors import fail
from ...reference.linear import fp8_linear as reference
from ...selection import costs
from ...selection.costs import CallSizes, Cost, CostModel, weight_tiles
from ..common.define import define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from ..common.validate import E4M3, FLOATS, describe, expect, expect_dim, expect_weight_scale


def _check(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> None:
    op = "fp8_linear"
    if x.dtype not in FLOATS or x.dim() == 0:
        fail("E201", got=describe(x), rule=f"{op}: x [..., K] is bfloat16, float16 or float32")
    expect(weight, f"{op}: weight [N, K]", E4M3)
    expect_dim(x.shape[-1], weight.shape[1], f"{op}: the last dim of x is the K of weight")
    expect_weight_scale(weight_scale, weight, f"{op}: weight_scale")
    if beside is not None:
        expect(beside, f"{op}: beside [M, K] as x", (x.dtype,))
        expect_dim(beside.shape[1], weight.shape[1], f"{op}: the last dim of beside is the K of weight")


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> Tensor:
    if beside is None:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return x.new_empty((*x.shape[:-1], weight.shape[0] + beside.shape[0]), dtype=torch.float32)


def _cost_beside(call: CallSizes) -> list[Cost]:
    """Return the cost of a second GEMM, with a weight that is not quantised."""
    if call.arguments.get("beside") is None:
        return []
    (rows, k), x, outputs = call.dims("beside"), call.dims("x"), call.dims("weight")[0]
    return [costs.beside(math.prod(x) // k, k, outputs, rows, call.size("x"))]


fp8_linear = define(
    "fp8_linear",
    reference=reference.fp8_linear,
    fake=_fake,
    check=_check,
    on_cpu=on_cpu.fp8_linear,
    kernel="dsv4_compile.kernels.linear.fp8_linear",
    lowering="dsv4_compile.lowering.linear.fp8_linear",
    cost=CostModel(
        lambda T, N, K, e=2, s=1: (e * T * (K + N) + N * K + s * weight_tiles(N, K), 2 * T * N * K),
        sizes=lambda call: call.of_product("x", "weight", "weight_scale"),
        added=_cost_beside,
        operands="e4m3",
    ),
    invariant=Invariance(rows=("x",), on_cpu=AS_IT_IS, kernel=PINNED),
)
