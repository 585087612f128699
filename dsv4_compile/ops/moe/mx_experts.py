"""`torch.ops.dsv4.mx_experts`; defined in reference/moe/mx_experts.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.moe import mx_experts as cpu
from ...errors import check, fail
from ...layout import MX_TILE
from ...reference.moe import mx_experts as reference
from ...reference.moe.expert_weights import MXFP4_DTYPES, columns, scale_shape, weight_format
from ...reference.moe.mx_experts import MxExperts
from ...selection.costs import FLOAT32, INT32, CallSizes, CostModel, smaller
from ..common.define import define
from ..common.validate import E4M3, FLOATS, INTS, describe, expect, expect_dim, expect_weight_scale

_OP = "mx_experts"
_BYTES = (torch.float8_e8m0fnu, torch.uint8)


def _expect_floating(name: str, weight: Tensor, scale: Tensor | None) -> bool:
    """Return whether a weight is floating, and raise E201 if its scales do not belong to it."""
    floating = weight_format(weight) == "float"
    if floating:
        check(scale is None, "E201", got=f"{_OP}: {name}_scale", rule=f"{name} in {weight.dtype} has no scales")
    elif scale is None:
        fail("E201", got=f"{_OP}: {name} {describe(weight)} without {name}_scale", rule="quantised weights have scales")
    return floating


def _expect_routed(name: str, weight: Tensor, scale: Tensor | None) -> None:
    expect(weight, f"{_OP}: {name} [E, N, K]", (*FLOATS, *MXFP4_DTYPES))
    if _expect_floating(name, weight, scale) or scale is None:
        return
    expect_dim(columns(weight) % MX_TILE, 0, f"{_OP}: K of {name} is a multiple of {MX_TILE}; the remainder")
    expect(scale, f"{_OP}: {name}_scale [E, N, K / {MX_TILE}]", _BYTES)
    if tuple(scale.shape) != scale_shape(weight):
        fail("E201", got=describe(scale), rule=f"{_OP}: {name}_scale is {list(scale_shape(weight))}")


def _expect_shared(name: str, weight: Tensor, scale: Tensor | None, quantize_input: bool) -> None:
    expect(weight, f"{_OP}: {name} [N, K]", (*FLOATS, E4M3))
    if _expect_floating(name, weight, scale) or scale is None:
        return
    expect_weight_scale(scale, weight, f"{_OP}: {name}_scale", MX_TILE)
    if quantize_input:
        expect_dim(weight.shape[1] % MX_TILE, 0, f"{_OP}: K of {name} is a multiple of {MX_TILE}; the remainder")


def _check(call: MxExperts) -> None:
    expect(call.x, f"{_OP}: x [T, D]", FLOATS)
    expect(call.ids, f"{_OP}: ids [T, K]", INTS)
    expect(call.weights, f"{_OP}: weights [T, K]", torch.float32)
    tokens, hidden = call.x.shape
    expect_dim(call.ids.shape[0], tokens, f"{_OP}: ids and x have the same tokens")
    expect_dim(call.weights.shape[0], tokens, f"{_OP}: weights and x have the same tokens")
    expect_dim(call.weights.shape[1], call.ids.shape[1], f"{_OP}: weights and ids have the same places")
    _expect_routed("w13", call.w13, call.w13_scale)
    _expect_routed("w2", call.w2, call.w2_scale)
    expect_dim(call.w2.shape[0], call.w13.shape[0], f"{_OP}: w2 and w13 have the same experts")
    _expect_shared("shared_w13", call.shared_w13, call.shared_w13_scale, call.quantize_input)
    _expect_shared("shared_w2", call.shared_w2, call.shared_w2_scale, call.quantize_input)
    for prefix, w13, w2 in (("", call.w13, call.w2), ("shared_", call.shared_w13, call.shared_w2)):
        expect_dim(columns(w13), hidden, f"{_OP}: {prefix}w13 has the D of x")
        expect_dim(w2.shape[-2], hidden, f"{_OP}: {prefix}w2 has the D of x")
        expect_dim(w13.shape[-2], 2 * columns(w2), f"{_OP}: {prefix}w13 has 2 I rows, I the columns of {prefix}w2")


def _fake(call: MxExperts) -> Tensor:
    return call.x.new_empty(call.x.shape)


def _sizes(call: CallSizes) -> dict[str, int]:
    experts, rows = call.dims("w13")[:2]
    row = call.bytes_of("w13", "w2", "w13_scale", "w2_scale") // experts
    shared = call.bytes_of("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale")
    return call.of_rows("x") | {"K": call.dims("ids")[1], "N": experts, "L": rows // 2, "row": row, "S": shared}


mx_experts = define(
    _OP,
    reference=reference.mx_experts,
    on_cpu=cpu.mx_experts,
    fake=_fake,
    check=_check,
    arguments=MxExperts,
    kernel="dsv4_compile.kernels.moe.mx_experts",
    cost=CostModel(
        lambda T, D, N, K, L, row, S, e=2: (
            T * (2 * e * D + K * (INT32 + FLOAT32)) + smaller(N, T * K) * row + S,
            6 * T * K * D * L,
        ),
        sizes=_sizes,
    ),
)
