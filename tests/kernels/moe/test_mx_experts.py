"""`mx_experts` against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host import gpu
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.moe import moe_experts as launches
from dsv4_compile.kernels.moe import mx_experts as kernels
from dsv4_compile.reference.linear.mx_linear import rounded_input
from dsv4_compile.reference.moe.mx_experts import MxExperts
from dsv4_compile.reference.moe.mx_experts import mx_experts as reference
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, sees
from tests.kernels.moe.mx_problems import mx_experts
from tests.kernels.moe.problems import error
from tests.kernels.moe.programs import random_order
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
WRITTEN = (
    "p_out", "p_results", "p_hidden", "p_shared_hidden", "p_arrived", "p_unpacked", "p_rounded", "p_order", "p_tiles",
    "p_cursor", "p_counts",
)  # fmt: skip
ACCURACY = 4e-3
"""Relative error of all results: a sum in a different order may round a hidden state to its neighbour in e4m3."""


def run(call: MxExperts, seed: int = 0) -> Tensor:
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(launches, "arrival_counters", lambda count, device: counters),
        poisoned_empty(),
        checked(mutated=WRITTEN) as seen,
        random_order(seed),
    ):
        got = kernels.mx_experts(call)
    rounds = call.quantize_input and call.w13_scale is not None and len(call.x) > 0
    assert ("round_experts_input_kernel" in seen) == rounds
    assert not counters.any()
    return got


def check(call: MxExperts, seed: int = 0) -> Tensor:
    got, want = run(call, seed), reference(call)
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    assert torch.equal(got.isnan(), want.isnan())
    got_, want_ = got.double().nan_to_num(), want.double().nan_to_num()
    assert error(got_, want_) <= ACCURACY
    worst = (got_ - want_).norm(dim=1) - 5 * ACCURACY * want_.norm(dim=1)
    assert not len(worst) or worst.max() <= 1e-6 * want_.norm(), "a token is wrong"
    return got


@interpreted
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "kind", "shared"), [(1, "mxfp4", "blocks"), (7, "mxfp4", "bfloat16"), (19, "mxfp4", "blocks")]
)
def test_results_are_the_references(tokens: int, kind: str, shared: str, quantize: bool) -> None:
    check(mx_experts(tokens, kind=kind, shared=shared, quantize=quantize), seed=tokens)


@interpreted
def test_floating_experts_are_the_references() -> None:
    check(mx_experts(5, kind="bfloat16", shared="bfloat16"))
    check(mx_experts(5, kind="bfloat16", shared="blocks", quantize=False))


@interpreted
@pytest.mark.parametrize("shared_inner", [32, 288, 64])
def test_rows_of_the_shared_expert_on_a_rank_are_multiples_of_32(shared_inner: int) -> None:
    check(mx_experts(4, shared_inner=shared_inner))


@interpreted
@pytest.mark.parametrize("tile", [16, 64])
def test_planned_results_are_the_references(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "FEW_PLACES", 8)
    monkeypatch.setattr(launches, "choose_tokens", lambda *sizes: tile)
    monkeypatch.setattr(launches, "plan", launches.plan.__wrapped__)
    check(mx_experts(40, count=4))


@interpreted
def test_many_tokens_come_in_passes_and_are_added_up_by_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW_TOKENS", 4), ("MOST_TOKENS", 12)):
        monkeypatch.setattr(launches, name, value)
    monkeypatch.setattr(launches, "plan", launches.plan.__wrapped__)
    call = mx_experts(20, count=4)
    whole = check(call)
    assert_bitwise(check(call, seed=3), whole)


@interpreted
def test_routing_weights_come_before_the_rounding_of_hidden_states() -> None:
    """A weight that is no power of two rounds other hidden states than one applied to the result."""
    call = mx_experts(6, top_k=1)._replace(weights=torch.full((6, 1), 0.7))
    after = reference(call._replace(weights=torch.ones(6, 1)))
    assert error(check(call).double(), (0.7 * after).double()) > ACCURACY


@interpreted
def test_inputs_are_rounded_as_by_the_reference_in_both_orders() -> None:
    x = strided(torch.randn(3, 1280) * 10.0 ** torch.randint(-9, 3, (3, 1))).bfloat16()
    with poisoned_empty(), checked(mutated=WRITTEN):
        unpacked, natural = kernels.round_input(x, True, True)
    assert unpacked is not None and natural is not None
    want = rounded_input(x.float(), True)
    assert_bitwise(natural.float(), want)
    assert_bitwise(unpacked.view(3, -1, 2, 2, 8).permute(0, 1, 4, 3, 2).reshape(3, -1).float(), want)


@interpreted
def test_ids_outside_the_experts_add_nothing() -> None:
    call = mx_experts(9, top_k=3)
    check(call._replace(ids=hostile_indices((9, 3), 5), first_expert=0))
    check(call._replace(ids=call.ids.long() + 7, first_expert=9))
    check(call._replace(ids=torch.full((9, 3), -1, dtype=torch.int32)))


@interpreted
def test_clamps_and_nan_are_the_references() -> None:
    call = mx_experts(6)
    call.x[2, 5] = torch.nan
    check(call._replace(x=call.x * 8, limit=0.5))


@interpreted
def test_arguments_are_read_where_they_are_and_no_token_gives_an_empty_result() -> None:
    call = mx_experts(5)
    check(call._replace(x=padded(call.x), ids=strided(call.ids), weights=strided(call.weights)))
    check(call._replace(x=strided(call.x), quantize_input=False))
    assert check(mx_experts(0)).shape == (0, 128)


@interpreted
def test_every_scale_of_a_block_means_its_power_of_two() -> None:
    call = mx_experts(2, quantize=False)
    for name, byte in (("shared_w13", 40), ("shared_w13", 140), ("shared_w2", 60), ("shared_w2", 180)):
        scale = torch.full_like(getattr(call, f"{name}_scale"), byte)
        check(call._replace(**{f"{name}_scale": scale.view(torch.float8_e8m0fnu)}, limit=1e4))


@interpreted
def test_weights_are_read_without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    call = mx_experts(4)
    want = run(call)
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("hip", 0, 8))
    monkeypatch.setattr(gpu, "gpu_of", lambda device: Gpu("hip", 0, 8))
    assert error(run(call).double(), want.double()) <= ACCURACY


def test_unsupported_calls_say_why() -> None:
    why, call = kernels.why_unsupported_mx_experts, mx_experts(2)
    assert why(call) == ""
    assert "x is torch.float32" in why(call._replace(x=call.x.float()))
    assert "scales that are powers of two" in why(call._replace(shared_w2_scale=torch.ones(4, 3)))
    assert "these are floating" in why(mx_experts(2, kind="bfloat16"))
    rows = mx_experts(2, inner=288)
    assert "w2 has N of a multiple of 64 and K of 128, not 128 and 288" in why(rows)
    assert "read by TMA" in why(call._replace(shared_w13=padded(call.shared_w13)))
    assert "in bfloat16, w13 is torch.float32" in why(
        call._replace(w13=torch.empty(5, 256, 128), w13_scale=None, quantize_input=False)
    )


def flash(tokens: int, count: int, shared_inner: int = 2304) -> MxExperts:
    """Unwritten experts of V4.1-Flash, `count` of them."""
    hidden, inner, u8, f8 = 5120, 2304, torch.uint8, torch.float8_e4m3fn
    return MxExperts(
        torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, 6, dtype=torch.int32),
        torch.empty(tokens, 6), torch.empty(count, 2 * inner, hidden // 2, dtype=u8),
        torch.empty(count, hidden, inner // 2, dtype=u8), torch.empty(2 * shared_inner, hidden, dtype=f8),
        torch.empty(hidden, shared_inner, dtype=f8), torch.empty(count, 2 * inner, hidden // 32, dtype=u8),
        torch.empty(count, hidden, inner // 32, dtype=u8), torch.empty(shared_inner // 16, hidden // 32, dtype=u8),
        torch.empty(hidden // 32, shared_inner // 32, dtype=u8), quantize_input=True,
    )  # fmt: skip


CASES: list[tuple[str, int, int]] = [
    *(("sm_90", tokens, 2304) for tokens in (1, 32, 128, 1000, 4000)),
    ("sm_90", 8, 288),
    ("sm_90", 128, 576),
    ("sm_100", 32, 2304),
    ("sm_120", 1, 2304),
    ("sm_120", 1000, 2304),
    ("gfx942", 8, 576),
    ("gfx950", 1000, 2304),
]


@pytest.mark.parametrize(("target", "tokens", "shared_inner"), CASES)
def test_they_compile_ahead_of_time_within_shared_memory(
    target: str, tokens: int, shared_inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(monkeypatch, target)
    for module in (kernels, launches):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS[target][0])
    call = flash(tokens, 16, shared_inner)
    with compiled_for(target) as compiled:
        kernels.mx_experts(call)
    names = [kernel.metadata.name for kernel in compiled]
    assert {"round_experts_input_kernel", "gate_up_kernel", "down_kernel"} <= {*names}
    for kernel in compiled:
        assert kernel.assembled and kernel.metadata.shared <= GPUS[target][1] * 1024
        if target == "sm_90":
            assert kernel.resources()["LOCAL"] == 0, f"{kernel.metadata.name} spills"


def test_plans_differ_from_those_of_moe_experts_in_roundings() -> None:
    call = flash(8, 16)
    operands = kernels.weights_of(kernels.arguments_of(call), blocks=True)
    problem: Any = kernels.problem_of(call, operands)
    plan = launches.plan(problem, 8, GPUS["sm_90"][0])
    assert isinstance(plan, launches.ExpertsPlan)
    assert plan.rounding == (True, True) and not plan.exact and plan.gate_up.shared_tile.kind == "blocks"
