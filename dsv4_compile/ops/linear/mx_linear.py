"""`torch.ops.dsv4.mx_linear`."""

from __future__ import annotations

from torch import Tensor

from ...errors import fail
from ...layout import MX_TILE, cdiv
from ...reference.linear import mx_linear as reference
from ...selection.costs import CostModel
from ..common.define import Traced, define
from ..common.validate import E4M3, FLOATS, describe, expect, expect_dim, expect_weight_scale

_OP = "mx_linear"


def _check(x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True) -> None:
    if x.dtype not in FLOATS or x.dim() == 0:
        fail("E201", got=describe(x), rule=f"{_OP}: x [..., K] is bfloat16, float16 or float32")
    expect(weight, f"{_OP}: weight [N, K]", E4M3)
    expect_dim(x.shape[-1], weight.shape[1], f"{_OP}: the last dim of x is the K of weight")
    expect_weight_scale(weight_scale, weight, f"{_OP}: weight_scale", MX_TILE)
    if quantize_input:
        expect_dim(weight.shape[1] % MX_TILE, 0, f"{_OP}: K is a multiple of {MX_TILE}; the remainder")


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


mx_linear = define(
    _OP,
    reference=reference.mx_linear,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.linear.mx_linear",
    lowering=Traced(yields="IR dequantises the whole weight before its GEMM"),
    cost=CostModel(
        lambda T, N, K, e=2, s=1: (e * T * (K + N) + N * K + s * cdiv(N, MX_TILE) * cdiv(K, MX_TILE), 2 * T * N * K),
        sizes=lambda call: call.of_product("x", "weight", "weight_scale"),
        operands="e4m3",
    ),
)
