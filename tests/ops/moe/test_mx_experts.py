"""`mx_experts` against one place at a time, in float64, and against `moe_experts` where both apply."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.row_format import round_to_grid
from dsv4_compile.reference.moe.mx_experts import MxExperts, expert_matrix, mx_experts
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

op = torch.ops.dsv4.mx_experts


def expert(call: MxExperts, x: Tensor, w13: Tensor, w2: Tensor, weight: float, quantise: bool) -> Tensor:
    """One expert of one token with the roundings of the definition, sums in float64."""
    dtype = call.x.dtype

    def rounded(row: Tensor) -> Tensor:
        return round_to_grid(row.float(), "mxfp8").double() if quantise else row.double()

    gate, up = (w13.double() @ rounded(x)).to(dtype).double().chunk(2)
    hidden = torch.nn.functional.silu(gate.clamp(max=call.limit)) * up.clamp(-call.limit, call.limit) * weight
    return (w2.double() @ rounded(hidden.to(dtype))).to(dtype).double()


@pytest.mark.parametrize("form", [op, lambda *args: mx_experts(MxExperts(*args))], ids=["CPU", "reference"])
@pytest.mark.parametrize("number", [0, 1])
def test_each_place_adds_its_expert_and_the_shared_one(number: int, form: object) -> None:
    call = MxExperts(*op_samples("mx_experts")[number])
    result = form(*call)  # type: ignore[operator]
    shared = [
        expert_matrix(w, s)
        for w, s in ((call.shared_w13, call.shared_w13_scale), (call.shared_w2, call.shared_w2_scale))
    ]
    for token, x in enumerate(call.x):
        want = expert(call, x, *shared, 1.0, call.quantize_input)
        for place, number in enumerate((call.ids[token] - call.first_expert).tolist()):
            if 0 <= number < call.w13.shape[0]:
                scales = [None if s is None else s[number] for s in (call.w13_scale, call.w2_scale)]
                w13, w2 = (expert_matrix(w[number], s) for w, s in zip((call.w13, call.w2), scales, strict=True))
                want = want + expert(call, x, w13, w2, float(call.weights[token, place]), call.quantize_input)
        tolerance = 3e-2 if call.x.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            result[token].double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max())
        )


def test_in_float32_it_is_moe_experts() -> None:
    call = MxExperts(*op_samples("mx_experts")[1])
    shared = call.shared_w13, call.shared_w2
    want = torch.ops.dsv4.moe_experts(call.x, call.ids, call.weights, call.w13, call.w2, None, None, *shared, limit=0.5)
    torch.testing.assert_close(op(*call), want, rtol=1e-4, atol=1e-4)


def test_blocks_of_the_shared_expert_are_32_by_32() -> None:
    """Scales of 128x128 blocks, as V4 has, do not fit."""
    call = MxExperts(*op_samples("mx_experts")[0])
    with pytest.raises(InputError, match="one scale per block"):
        op(*call._replace(shared_w13_scale=torch.full((1, 1), 127, dtype=torch.uint8)))


def test_op_keeps_its_promises() -> None:
    check_op(OPS["mx_experts"], op_samples("mx_experts")[1:])
    call = MxExperts(*op_samples("mx_experts")[0])
    nobody = call._replace(ids=torch.full_like(call.ids, -1))
    check_op(OPS["mx_experts"], [nobody], utilities=False)


def test_wrong_arguments_raise() -> None:
    call = MxExperts(*op_samples("mx_experts")[0])
    with pytest.raises(InputError, match="without w13_scale"):
        op(*call._replace(w13_scale=None))
    with pytest.raises(InputError, match="2 I rows"):
        op(*call._replace(shared_w13=call.shared_w13[:32], shared_w13_scale=call.shared_w13_scale[:1]))
