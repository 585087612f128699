"""`moe_experts` of so few tokens that an expert has about one, on sm_90, in the checking interpreter and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.moe import moe_experts as kernels
from dsv4_compile.kernels.moe import moe_experts_sm90_few_tokens as few_tokens
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from tests.kernels.gpus import sees
from tests.kernels.moe.problems import (
    E8M0_BYTES,
    assert_accurate,
    beside_a_large_element,
    error,
    exact,
    experts,
    with_nan_scales,
    with_scale,
    with_shared_scales,
)
from tests.kernels.moe.programs import run_launches
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
HOPPER = Gpu("cuda", 90, 132)
LAUNCHED = ["pack_experts_input_kernel", "dot_gate_up_kernel", "dot_down_kernel"]
WRITTEN = ("p_packed", "p_row_scale", "states[0]", "states[1]", "shared_states[0]", "shared_states[1]", "p_out")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let launchers see a Hopper GPU."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("interpreter", 90, 132))
    kernels.plan.cache_clear()
    yield
    kernels.plan.cache_clear()


def run(call: ExpertsArguments, seed: int = 0) -> Tensor:
    return run_launches(lambda: kernels.moe_experts(call), LAUNCHED, WRITTEN, seed)


def check(call: ExpertsArguments, seed: int = 0) -> Tensor:
    assert kernels.why_unsupported_moe_experts(call) == ""
    got = run(call, seed)
    assert_accurate(got, call)
    return got


def few(tokens: int, **sizes: Any) -> ExpertsArguments:
    return experts(
        tokens, **{"kind": "mxfp4", "shared": "e4m3", "hidden": 128, "inner": 128, "shared_inner": 128} | sizes
    )


@interpreted
@pytest.mark.parametrize(("tokens", "hidden", "inner", "shared"), [(1, 256, 128, ""), (2, 128, 256, "e4m3")])
def test_results_are_the_references(tokens: int, hidden: int, inner: int, shared: str) -> None:
    check(few(tokens, shared=shared, hidden=hidden, inner=inner, shared_inner=128, top_k=3), seed=tokens)


@interpreted
def test_rows_of_more_groups_than_a_cta_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "block_of", lambda groups: 2)
    check(few(1))


@interpreted
def test_inputs_and_hidden_states_keep_more_than_bfloat16() -> None:
    call = few(2)
    assert error(check(call).float(), exact(call)) < 2e-3


@interpreted
@pytest.mark.parametrize("exponent", [-60, 60])
def test_hidden_states_of_any_size_count(exponent: int) -> None:
    call = few(1, shared="")
    assert call.w13_scale is not None and call.w2_scale is not None
    half = call.w13_scale.shape[1] // 2
    up = call.w13_scale[:, half:]
    check(call._replace(w13_scale=torch.cat([call.w13_scale[:, :half], up + exponent], 1), limit=float("inf")))


@interpreted
def test_hidden_states_of_a_group_may_have_any_scale() -> None:
    """Eight hidden states have one scale: those of a word may be 2^40 times those of the next."""
    call = few(1, shared="")
    assert call.w13_scale is not None
    scale = call.w13_scale.clone()
    scale[:, 128 + 8 : 128 + 16] -= 40
    scale[:, 128 + 32 :] -= 80
    check(call._replace(w13_scale=scale))


@interpreted
def test_ids_outside_the_experts_add_nothing_and_their_weights_are_not_read() -> None:
    call = few(2)
    for first in (0, 3):
        ids = hostile_indices((2, 2), 8, dtype=torch.int64)
        outside = (ids < first) | (ids >= first + 5)
        check(call._replace(ids=ids, weights=call.weights.masked_fill(outside, torch.nan), first_expert=first))
    nobody = torch.full((2, 2), -1, dtype=torch.int32)
    assert not check(call._replace(ids=nobody, shared_w13=None, shared_w2=None)).any()
    assert check(call._replace(ids=nobody)).any()


@interpreted
@pytest.mark.parametrize("form", [torch.float32, torch.float8_e8m0fnu])
def test_scales_of_the_shared_expert_come_in_every_form(form: torch.dtype) -> None:
    check(with_shared_scales(few(1, hidden=256, shared_inner=256), form))


@interpreted
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_every_e8m0_scale_means_its_power_of_two(name: str) -> None:
    call = few(1, count=2, shared="")
    for byte in E8M0_BYTES[:2] + E8M0_BYTES[-5:]:
        check(with_scale(call, name, byte))


@interpreted
def test_small_elements_beside_a_large_one_count() -> None:
    check(beside_a_large_element(few(1, shared="")))


@interpreted
def test_a_token_that_is_not_finite_is_nan_and_others_are_not() -> None:
    call = few(3, top_k=1)
    x = 50 * call.x
    x[0, 5], x[2, 1] = torch.nan, -torch.inf
    got = run(call._replace(x=x))
    assert got[[0, 2]].isnan().all()
    assert_accurate(got[1:2], call._replace(x=x[1:2], ids=call.ids[1:2], weights=call.weights[1:2]))
    x[0] = 0
    check(call._replace(x=x.nan_to_num() * 2.0**-140))


@interpreted
def test_a_scale_of_nan_is_not_infinity_which_a_clamp_would_hide() -> None:
    assert check(with_nan_scales(few(1, count=2, shared=""))).isnan().all()


@interpreted
def test_arguments_are_read_where_they_are() -> None:
    call = few(2)
    check(call._replace(x=padded(call.x), ids=strided(call.ids), weights=padded(call.weights)))
    check(call._replace(x=strided(call.x), ids=padded(call.ids.long()), weights=strided(call.weights)))


@interpreted
def test_results_do_not_depend_on_the_order_of_programs_nor_on_other_tokens() -> None:
    call = few(2)
    first = run(call, seed=1)
    assert_bitwise(run(call, seed=2), first)
    alone = call._replace(x=call.x[1:], ids=call.ids[1:], weights=call.weights[1:])
    assert_bitwise(run(alone), first[1:])


def test_what_fits_is_a_few_tokens_in_checkpoint_formats() -> None:
    def fits(tokens: int, inner: int = 128, **formats: str) -> bool:
        sizes: dict[str, Any] = {"hidden": 128, "inner": inner, "shared": "e4m3", "kind": "mxfp4"} | formats
        return few_tokens.fits(kernels.problem_of(experts(1, **sizes)), tokens)

    assert fits(1) and fits(6) and not fits(7)
    assert fits(4, 2048) and not fits(5, 2048)
    assert fits(1, shared="") and not fits(1, shared="bfloat16")
    assert not any(fits(1, kind=kind) for kind in ("bfloat16", "e4m3", "interleaved"))


def test_other_gpus_and_batch_invariant_calls_take_other_kernels() -> None:
    problem = kernels.problem_of(few(1))
    assert isinstance(kernels.plan(problem, 1, HOPPER), few_tokens.FewTokensPlan)
    assert not isinstance(kernels.plan(problem, 1, HOPPER, "on"), few_tokens.FewTokensPlan)
    assert not isinstance(kernels.plan(problem, 1, Gpu("cuda", 100, 148)), few_tokens.FewTokensPlan)


@pytest.mark.parametrize("shared", ["", "e4m3"])
def test_they_compile_for_sm_90_without_spills(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, "sm_90")
    monkeypatch.setattr(kernels, "gpu_of", lambda device: HOPPER)
    call = few(1, shared=shared, hidden=4096, inner=1024, shared_inner=1024, top_k=5)
    with compiled_for("sm_90") as compiled:
        kernels.moe_experts(call)
    assert [kernel.metadata.name for kernel in compiled] == LAUNCHED
    for kernel in compiled[1:]:
        assert "ld.global.nc.L1::no_allocate.v4.b32" in kernel.asm["ptx"]
        assert kernel.resources()["STACK"] == 0


def test_blocks_leave_no_thread_idle_where_few_steps_do() -> None:
    groups = {2: 32, 32: 32, 96: 32, 128: 128, 160: 128, 192: 64, 224: 128, 384: 128, 4096: 128}
    assert {number: few_tokens.block_of(number) for number in groups} == groups
