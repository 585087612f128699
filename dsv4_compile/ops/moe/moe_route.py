"""`torch.ops.dsv4.moe_route`; defined in reference/moe/moe_route.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.moe import moe_route as cpu
from ...errors import check, fail
from ...reference.moe import moe_route as reference
from ...selection.costs import FLOAT32, INT32, CallSizes, Cost, CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_dim
from ..common.validate_batch import expect_positive

_OP = "moe_route"


def _check(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> None:
    expect(x, f"{_OP}: x [T, D]", FLOATS)
    expect(gate, f"{_OP}: gate [E, D]", FLOATS)
    expect_dim(gate.shape[1], x.shape[1], f"{_OP}: x and gate have the same D")
    expect_positive(_OP, top_k=top_k)
    if top_k > gate.shape[0]:
        fail("E201", got=f"top_k={top_k} of {gate.shape[0]} experts", rule=f"{_OP}: top_k is at most the experts")
    check(
        (token_ids is None) == (tid2eid is None),
        "E201",
        got=f"{_OP} with {'tid2eid' if token_ids is None else 'token_ids'} alone",
        rule="token_ids and tid2eid come together",
    )
    if bias is not None:
        expect(bias, f"{_OP}: bias [E]", torch.float32)
        expect_dim(bias.shape[0], gate.shape[0], f"{_OP}: bias has one element for every expert")
        check(tid2eid is None, "E201", got=f"{_OP} with bias and tid2eid", rule="a table of experts takes no bias")
    if token_ids is not None and tid2eid is not None:
        expect(token_ids, f"{_OP}: token_ids [T]", INTS)
        expect_dim(token_ids.shape[0], x.shape[0], f"{_OP}: token_ids has one element for every token")
        expect(tid2eid, f"{_OP}: tid2eid [V, K]", INTS)
        expect_dim(tid2eid.shape[1], top_k, f"{_OP}: tid2eid has top_k columns")
        expect_positive(_OP, **{"rows of tid2eid": tid2eid.shape[0]})


def _fake(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], top_k
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def _cost_of_options(call: CallSizes) -> list[Cost]:
    """Return the bytes of a wider gate, of token ids and of rows of the table, less those of an absent bias."""
    (experts, size), tokens = call.dims("gate"), call.dims("x")[0]
    more = experts * size * (call.size("gate") - call.size("x"))
    if call.arguments.get("bias") is None:
        more -= FLOAT32 * experts
    if call.arguments.get("tid2eid") is not None:
        more += tokens * (call.size("token_ids") + call.size("tid2eid") * int(call.arguments["top_k"]))
    return [Cost(more, 0)]


moe_route = define(
    "moe_route",
    reference=reference.moe_route,
    on_cpu=cpu.moe_route,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.moe.moe_route",
    lowering=Traced(yields="IR is a GEMM, a sort and two kernels, the kernel one launch"),
    cost=CostModel(
        lambda T, D, N, K, e=2: (e * D * (T + N) + FLOAT32 * N + T * K * (INT32 + FLOAT32), 2 * T * N * D),
        sizes=lambda call: call.of_rows("x") | {"N": call.dims("gate")[0], "K": int(call.arguments["top_k"])},
        added=_cost_of_options,
    ),
    invariant=Invariance(rows=("x", "token_ids"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)


def _check_images(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    top_k: int = 6,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> None:
    op = "moe_route_images"
    expect(is_image, f"{op}: is_image [T]", torch.bool)
    expect(bias, f"{op}: bias [E]", torch.float32)
    expect(image_bias, f"{op}: image_bias [E]", torch.float32)
    _check(x, gate, bias, top_k=top_k)
    expect_dim(is_image.shape[0], x.shape[0], f"{op}: is_image has one element for every token")
    expect_dim(image_bias.shape[0], gate.shape[0], f"{op}: image_bias has one element for every expert")
    check(temperature > 0, "E201", got=f"{op}: temperature={temperature}", rule="a temperature is above 0")


def _fake_images(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    top_k: int = 6,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    return _fake(x, gate, top_k=top_k)


moe_route_images = define(
    "moe_route_images",
    reference=reference.moe_route_images,
    fake=_fake_images,
    check=_check_images,
    kernel="dsv4_compile.kernels.moe.moe_route",
    lowering=Traced(yields="IR is a GEMM, a sort and two kernels, the kernel one launch"),
    cost=CostModel(
        lambda T, D, N, K, e=2: (
            e * D * (T + N) + T + 2 * FLOAT32 * N + T * K * (INT32 + FLOAT32),
            2 * T * N * D,
        ),
        sizes=lambda call: call.of_rows("x") | {"N": call.dims("gate")[0], "K": int(call.arguments["top_k"])},
    ),
)
