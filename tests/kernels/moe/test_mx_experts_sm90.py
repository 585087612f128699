"""`mx_experts` of few tokens an expert on sm_90, in the checking interpreter and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.moe import mx_experts as kernels
from dsv4_compile.kernels.moe import mx_experts_sm90 as sm90
from dsv4_compile.reference.moe.mx_experts import MxExperts
from dsv4_compile.reference.moe.mx_experts import mx_experts as reference
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from tests.kernels.gpus import GPUS, sees
from tests.kernels.moe.mx_problems import mx_experts
from tests.kernels.moe.problems import error
from tests.kernels.moe.programs import run_launches
from tests.kernels.moe.test_mx_experts import ACCURACY, flash
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
LAUNCHED = ["round_kernel", "mx_gate_up_kernel", "mx_down_kernel", "sum_kernel"]
WRITTEN = (
    *(f"results[{n}]" for n in range(4)),
    *(f"states[{n}]" for n in range(3)),
    *("p_results", "p_tiles", "p_out"),
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers see a Hopper GPU."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("interpreter", 90, 8))


def few(tokens: int, **sizes: Any) -> MxExperts:
    """Return random arguments that fit."""
    return mx_experts(tokens, **{"hidden": 256, "inner": 128, "shared_inner": 64, "count": 6, "top_k": 3} | sizes)


def run(call: MxExperts, seed: int = 0) -> Tensor:
    return run_launches(lambda: kernels.mx_experts(call), LAUNCHED, WRITTEN, seed)


def check(call: MxExperts, seed: int = 0) -> Tensor:
    got, want = run(call, seed), reference(call)
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    assert torch.equal(got.isnan(), want.isnan())
    got_, want_ = got.double().nan_to_num(), want.double().nan_to_num()
    assert error(got_, want_) <= ACCURACY
    worst = (got_ - want_).norm(dim=1) - 5 * ACCURACY * want_.norm(dim=1)
    assert worst.max() <= 1e-6 * want_.norm(), "a token is wrong"
    return got


@interpreted
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(2, 256, 128), (13, 128, 384)])
def test_results_are_the_references(tokens: int, hidden: int, inner: int) -> None:
    call = few(tokens, hidden=hidden, inner=inner)
    assert_bitwise(check(call, seed=1), check(call, seed=2))


@interpreted
@pytest.mark.usefixtures("hopper")
def test_an_expert_of_many_places_has_several_tiles() -> None:
    call = few(20, count=4, top_k=1)
    check(call._replace(ids=torch.ones_like(call.ids)))


@interpreted
@pytest.mark.usefixtures("hopper")
def test_ids_outside_the_experts_add_nothing() -> None:
    call = few(9)
    check(call._replace(ids=hostile_indices((9, 3), 6), first_expert=0))
    check(call._replace(ids=call.ids.long() + 7, first_expert=9))
    check(call._replace(ids=torch.full((9, 3), -1, dtype=torch.int32)))


@interpreted
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_spoils_its_token_alone(value: float) -> None:
    call = few(6)
    call.x[2, 5] = value
    got = check(call._replace(x=call.x * 8, limit=0.5))
    assert got[2].isnan().all() and not got[[0, 1, 3, 4, 5]].isnan().any()


@interpreted
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("byte", [0, 3, 150, 200])
def test_unusual_scales_mean_their_power_of_two(byte: int) -> None:
    call = few(3)
    w13_scale, w2_scale = call.w13_scale, call.w2_scale
    assert w13_scale is not None and w2_scale is not None
    w13_scale[2, 5, 1] = byte
    w2_scale[1, 7, 0] = min(byte, 150)
    check(call)


@interpreted
@pytest.mark.usefixtures("hopper")
def test_arguments_are_read_where_they_are() -> None:
    call = few(5)
    check(call._replace(x=padded(call.x), ids=strided(call.ids), weights=strided(call.weights)))
    check(call._replace(x=strided(call.x)))


def test_calls_that_do_not_fit_take_the_other_launches() -> None:
    def fits(call: MxExperts, tokens: int = 2) -> bool:
        operands = kernels.weights_of(kernels.arguments_of(call), blocks=True)
        return sm90.fits(kernels.problem_of(call, operands), tokens)

    assert fits(few(1)) and fits(few(1), 16)
    assert not fits(few(1), 1) and not fits(few(1), 17)
    assert not fits(few(1, quantize=False))
    assert not fits(few(1, shared="bfloat16"))
    assert not fits(few(1, shared_inner=96))


@pytest.mark.parametrize("tokens", [2, 20])
def test_they_compile_ahead_of_time_without_spills(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, "sm_90")
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPUS["sm_90"][0])
    with compiled_for("sm_90") as compiled:
        kernels.mx_experts(flash(tokens, 16))
    assert [kernel.metadata.name for kernel in compiled] == LAUNCHED
    for kernel in compiled:
        resources = kernel.resources()
        assert resources["LOCAL"] == resources["STACK"] == 0, f"{kernel.metadata.name} spills"
        if "mx_" in kernel.metadata.name:
            assert resources["REG"] <= sm90.REGISTERS
            assert "instrShape = [16, 16, 32]" in kernel.asm["ttgir"], "an MMA of e4m3 for each scale"
