"""`torch.ops.dsv4.moe_experts`; defined in reference/moe/moe_experts.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...cpu.moe import moe_experts as cpu
from ...errors import check, fail
from ...layout import MX_TILE, WEIGHT_TILE
from ...reference.moe import moe_experts as reference
from ...reference.moe.expert_weights import (
    MXFP4_DTYPES,
    SCALE_COLUMNS,
    columns,
    scale_shape,
    weight_format,
)
from ...reference.moe.moe_experts import ExpertsArguments
from ...selection.costs import FLOAT32, INT32, CallSizes, Cost, CostModel, smaller
from ..common.define import define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from ..common.validate import E4M3, FLOATS, INTS, describe, expect, expect_dim

_OP = "moe_experts"
_BYTES = (torch.float8_e8m0fnu, torch.uint8)


def _expect_weight(name: str, weight: Tensor, scale: Tensor | None, dims: str) -> None:
    """Raise E201 unless `weight` has a known format and the scales that belong to it."""
    expect(weight, f"{_OP}: {name} {dims}", (*FLOATS, E4M3, *MXFP4_DTYPES))
    kind = weight_format(weight)
    if kind == "float":
        check(scale is None, "E201", got=f"{_OP}: {name}_scale", rule=f"{name} in {weight.dtype} has no scales")
        return
    if scale is None:
        fail("E201", got=f"{_OP}: {name} {describe(weight)} without {name}_scale", rule=f"{kind} weights have scales")
    if kind == "mxfp4":
        expect_dim(columns(weight) % MX_TILE, 0, f"{_OP}: K of {name} is a multiple of {MX_TILE}")
    scales = dims.replace("]", " / scale]")
    expect(scale, f"{_OP}: {name}_scale {scales}", _BYTES if kind == "mxfp4" else (torch.float32, *_BYTES))
    if tuple(scale.shape) != scale_shape(weight):
        fail("E201", got=describe(scale), rule=f"{_OP}: {name}_scale is {list(scale_shape(weight))}")


def _expect_pair(prefix: str, w13: Tensor, w2: Tensor, hidden: int) -> None:
    """Raise E201 unless the shapes of a gate-and-up weight and of a down weight belong together."""
    expect_dim(columns(w13), hidden, f"{_OP}: {prefix}w13 has the D of x")
    expect_dim(w2.shape[-2], hidden, f"{_OP}: {prefix}w2 has the D of x")
    expect_dim(w13.shape[-2], 2 * columns(w2), f"{_OP}: {prefix}w13 has 2 I rows, I the columns of {prefix}w2")
    if weight_format(w13) == "e4m3":
        rest = columns(w2) % WEIGHT_TILE
        expect_dim(rest, 0, f"{_OP}: I of {prefix}w13 in e4m3 is a multiple of {WEIGHT_TILE}; the remainder")


def _check(call: ExpertsArguments) -> None:
    expect(call.x, f"{_OP}: x [T, D]", FLOATS)
    expect(call.ids, f"{_OP}: ids [T, K]", INTS)
    expect_dim(call.ids.shape[0], call.x.shape[0], f"{_OP}: ids has a row for every token")
    expect(call.weights, f"{_OP}: weights [T, K]", torch.float32)
    expect_dim(call.weights.shape[0], call.x.shape[0], f"{_OP}: weights has a row for every token")
    expect_dim(call.weights.shape[1], call.ids.shape[1], f"{_OP}: weights has a weight for every id")
    _expect_weight("w13", call.w13, call.w13_scale, "[E, 2 I, D]")
    _expect_weight("w2", call.w2, call.w2_scale, "[E, D, I]")
    expect_dim(call.w2.shape[0], call.w13.shape[0], f"{_OP}: w13 and w2 have the same experts")
    check(call.w13.shape[0] > 0, "E201", got=f"{_OP}: w13 {describe(call.w13)}", rule="there is an expert")
    _expect_pair("", call.w13, call.w2, call.x.shape[1])
    if call.interleaved:
        kinds = [weight_format(weight) for weight in (call.w13, call.w2)]
        full_words = columns(call.w13) % SCALE_COLUMNS == 0 and columns(call.w2) % SCALE_COLUMNS == 0
        rule = f"interleaved weights are MXFP4 with K of a multiple of {SCALE_COLUMNS}"
        check(kinds == ["mxfp4"] * 2 and full_words, "E201", got=f"{_OP}: w13 {describe(call.w13)}", rule=rule)
    shared_w13, shared_w2 = call.shared_w13, call.shared_w2
    if shared_w13 is None or shared_w2 is None:
        shared = [shared_w13, shared_w2, call.shared_w13_scale, call.shared_w2_scale]
        rule = "shared_w13 and shared_w2 come together"
        check(shared == [None] * 4, "E201", got=f"{_OP} with a part of a shared expert", rule=rule)
        return
    _expect_weight("shared_w13", shared_w13, call.shared_w13_scale, "[2 Is, D]")
    _expect_weight("shared_w2", shared_w2, call.shared_w2_scale, "[D, Is]")
    _expect_pair("shared_", shared_w13, shared_w2, call.x.shape[1])


def _fake(call: ExpertsArguments) -> Tensor:
    return call.x.new_empty(call.x.shape)


def _sizes(call: CallSizes) -> dict[str, int]:
    (experts, rows, _), (_, top_k) = call.dims("w13"), call.dims("ids")
    row_bytes = call.bytes_of("w13", "w2", "w13_scale", "w2_scale") // experts
    return call.of_rows("x") | {"K": top_k, "N": experts, "L": rows // 2, "row": row_bytes}


def _cost_of_shared_expert(call: CallSizes) -> list[Cost]:
    """Return the cost of a shared expert, and the bytes that ids of 64 bits add."""
    tokens, hidden = call.dims("x")
    more = math.prod(call.dims("ids")) * (call.size("ids") - INT32)
    if call.arguments.get("shared_w13") is None:
        return [Cost(more, 0)]
    read = call.bytes_of("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale")
    return [Cost(more + read, 3 * tokens * hidden * call.dims("shared_w13")[0])]


moe_experts = define(
    "moe_experts",
    reference=reference.moe_experts,
    on_cpu=cpu.moe_experts,
    fake=_fake,
    check=_check,
    arguments=ExpertsArguments,
    kernel="dsv4_compile.kernels.moe.moe_experts",
    lowering="dsv4_compile.lowering.moe.moe_experts",
    cost=CostModel(
        lambda T, D, N, K, L, row, e=2: (
            T * (2 * e * D + K * (INT32 + FLOAT32)) + smaller(N, T * K) * row,
            6 * T * K * D * L,
        ),
        sizes=_sizes,
        added=_cost_of_shared_expert,
    ),
    invariant=Invariance(rows=("x", "ids", "weights"), on_cpu=AS_IT_IS, kernel=PINNED),
)
