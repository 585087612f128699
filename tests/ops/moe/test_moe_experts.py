"""`moe_experts` against a computation of one token and expert at a time, in every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.block_scale import dequantize_weight
from dsv4_compile.reference.common.quant import dequantize_mxfp4
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from tests.kernels.moe.problems import experts

moe_experts = OPS["moe_experts"]
OUTSIDE = (-(2**31), -7, -1, 5, 6, 2**31 - 1)


def wide(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return one expert's weight in float64."""
    if scale is None:
        return weight.double()
    dequantize = dequantize_weight if weight.dtype is torch.float8_e4m3fn else dequantize_mxfp4
    return dequantize(weight, scale).double()


def one_by_one(call: ExpertsArguments) -> Tensor:
    """Return float64 results, an expert of a token at a time."""
    out = torch.zeros(call.x.shape, dtype=torch.float64)

    def expert(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (w13 @ x).chunk(2)
        gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
        return w2 @ (gate / (1 + torch.exp(-gate)) * up)

    for t, (ids, weights) in enumerate(zip(call.ids.tolist(), call.weights.tolist(), strict=True)):
        x = call.x[t].double()
        for e, weight in zip(ids, weights, strict=True):
            row = e - call.first_expert
            if 0 <= row < len(call.w13):
                scales = [None if s is None else s[row] for s in (call.w13_scale, call.w2_scale)]
                out[t] += weight * expert(x, wide(call.w13[row], scales[0]), wide(call.w2[row], scales[1]))
        if call.shared_w13 is not None and call.shared_w2 is not None:
            shared = wide(call.shared_w13, call.shared_w13_scale), wide(call.shared_w2, call.shared_w2_scale)
            out[t] += expert(x, *shared)
    return out


def check(call: ExpertsArguments) -> Tensor:
    got = moe_experts(*call)
    assert (got.dtype, got.shape, got.is_contiguous()) == (call.x.dtype, call.x.shape, True)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[call.x.dtype]
    want = one_by_one(call)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    return got


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e4m3", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_each_token_gets_its_experts_by_their_weights(tokens: int, kind: str) -> None:
    check(experts(tokens, kind=kind, dtype=torch.float32))


@pytest.mark.parametrize("shared", ["float32", "e4m3", "mxfp4"])
def test_the_shared_expert_adds_to_every_token(shared: str) -> None:
    check(experts(4, kind="mxfp4", shared=shared, shared_inner=256, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_is_rounded_once(dtype: torch.dtype) -> None:
    check(experts(5, kind="bfloat16", shared="bfloat16", dtype=dtype))


def test_gate_and_up_are_clamped() -> None:
    call = experts(6, kind="float32", dtype=torch.float32)
    call = call._replace(x=40 * call.x)
    assert not torch.allclose(check(call), check(call._replace(limit=torch.inf)))


def test_ids_outside_the_experts_add_nothing() -> None:
    call = experts(12, kind="float32", dtype=torch.float32)
    ids = torch.tensor(OUTSIDE, dtype=torch.int32).view(-1, 1).expand(-1, 2)
    check(call._replace(ids=hostile_indices((12, 2), 5)))
    check(call._replace(ids=hostile_indices((12, 2), 5, dtype=torch.int64)))
    nothing = call._replace(x=call.x[:6], weights=call.weights[:6], ids=ids)
    assert not check(nothing).any()


def test_experts_and_intermediate_dims_of_ranks_add_up() -> None:
    call = experts(7, kind="float32", shared="float32", count=6, top_k=3, dtype=torch.float32)
    want, alone = check(call), call._replace(shared_w13=None, shared_w2=None)
    parts = [
        check(sample._replace(w13=call.w13[first : first + 3], w2=call.w2[first : first + 3], first_expert=first))
        for first, sample in ((0, call), (3, alone))
    ]
    torch.testing.assert_close(parts[0] + parts[1], want)
    halves = []
    for half in (slice(0, 64), slice(64, 128)):
        w13 = torch.cat([matrix[..., half, :] for matrix in call.w13.chunk(2, -2)], -2)
        halves.append(check(alone._replace(w13=w13, w2=call.w2[..., half])))
    torch.testing.assert_close(halves[0] + halves[1], check(alone))


@pytest.mark.parametrize("byte", [0, 1, 127, 128, 200, 252, 255])
def test_every_e8m0_scale_means_its_power_of_two(byte: int) -> None:
    call = experts(3, kind="mxfp4", dtype=torch.float32)
    assert call.w13_scale is not None and call.w2_scale is not None
    call.w13_scale.fill_(byte)
    call.x.mul_(2.0**-10)  # sums stay within float32
    got, want = moe_experts(*call), one_by_one(call)
    largest = float(want.nan_to_num().abs().max())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * largest + 1e-37, equal_nan=True)
    assert got.isnan().all() == (byte == 255)


def test_nan_keeps_to_its_token_and_to_the_tokens_of_its_expert() -> None:
    call = experts(8, kind="float32", dtype=torch.float32)
    want = moe_experts(*call)
    x = call.x.clone()
    x[3] = torch.nan
    got = moe_experts(*call._replace(x=x))
    assert got[3].isnan().all()
    got[3] = want[3]
    assert_bitwise(got, want)
    w13 = call.w13.clone()
    w13[2] = torch.nan
    got, touched = moe_experts(*call._replace(w13=w13)), (call.ids == 2).any(1)
    assert got[touched].isnan().all()
    torch.testing.assert_close(got[~touched], want[~touched])


def test_op_keeps_its_promises() -> None:
    call = experts(5, kind="mxfp4", shared="e4m3")
    floats = experts(3, kind="bfloat16")
    check_op(
        moe_experts,
        [
            call,
            call._replace(x=strided(call.x), ids=padded(call.ids), weights=strided(call.weights)),
            experts(4, kind="e4m3", shared="bfloat16"),
            experts(4, kind="interleaved"),
            floats._replace(x=floats.x[:1], ids=floats.ids[:1].long(), weights=floats.weights[:1]),
            floats._replace(x=floats.x[:0], ids=floats.ids[:0], weights=floats.weights[:0]),
        ],
    )


def changed(call: ExpertsArguments, **changes: Any) -> dict[str, Any]:
    return call._asdict() | changes


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mxfp4", {"w13_scale": None}, "mxfp4 weights have scales"),
        ("bfloat16", {"w2_scale": torch.zeros(5, 128, 4).byte()}, "has no scales"),
        ("mxfp4", {"w2_scale": torch.zeros(5, 128, 3).byte()}, r"w2_scale is \[5, 128, 4\]"),
        ("mxfp4", {"w2_scale": torch.zeros(5, 128, 4)}, "w2_scale"),
        ("e4m3", {"w13_scale": torch.zeros(5, 1, 1)}, r"w13_scale is \[5, 2, 1\]"),
        ("bfloat16", {"ids": torch.zeros(4, 2).int()}, "ids has a row for every token"),
        ("bfloat16", {"weights": torch.zeros(3, 1)}, "a weight for every id"),
        ("bfloat16", {"w2": torch.zeros(5, 128, 64)}, "2 I rows"),
        ("bfloat16", {"w2": torch.zeros(4, 128, 128)}, "the same experts"),
        ("bfloat16", {"w13": torch.zeros(5, 256, 64)}, "w13 has the D of x"),
        ("bfloat16", {"interleaved": True}, "interleaved weights are MXFP4"),
        ("bfloat16", {"shared_w2": torch.zeros(128, 64)}, "come together"),
        ("bfloat16", {"w13": torch.zeros(5, 256, 128).double()}, "w13"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        torch.ops.dsv4.moe_experts(**changed(experts(3, kind=kind), **changes))
