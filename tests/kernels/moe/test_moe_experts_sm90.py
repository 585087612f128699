"""`moe_experts` of few tokens an expert on sm_90, in the checking interpreter and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.moe import expert_gemm_sm90 as gemm
from dsv4_compile.kernels.moe import moe_experts as kernels
from dsv4_compile.kernels.moe import moe_experts_sm90 as sm90
from dsv4_compile.kernels.moe import moe_experts_sm90_few_tokens as few_tokens
from dsv4_compile.kernels.moe.expert_operands import Problem, Weight
from dsv4_compile.kernels.moe.expert_plan import PlanShape, most_tiles, plan_some
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poisoned_empty, strided
from tests.kernels.moe.problems import (
    E8M0_BYTES,
    assert_accurate,
    beside_a_large_element,
    error,
    exact,
    experts,
    places_by_expert,
    with_nan_scales,
    with_scale,
    with_shared_scales,
)
from tests.kernels.moe.programs import random_order, run_launches
from tests.support.bounds import checked

interpreted = pytest.mark.interpreted
LAUNCHED = ["split_kernel", "split_gate_up_kernel", "split_down_kernel", "sum_kernel"]
WRITTEN = (
    "results[0]",
    "results[1]",
    "results[2]",
    "p_tiles",
    "p_hidden",
    "p_hidden_scale",
    "p_shared_hidden",
    "p_shared_hidden_scale",
    "p_results",
    "p_out",
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers see a Hopper GPU of one SM, which few CTAs fill, and keep a few tokens from dot products."""
    gpu = Gpu("interpreter", 90, 1)
    monkeypatch.setattr(kernels, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 0)
    kernels.plan.cache_clear()


def run(call: ExpertsArguments, seed: int = 0) -> Tensor:
    return run_launches(lambda: kernels.moe_experts(call), LAUNCHED, WRITTEN, seed)


def check(call: ExpertsArguments, seed: int = 0) -> Tensor:
    assert kernels.why_unsupported_moe_experts(call) == ""
    got = run(call, seed)
    assert_accurate(got, call)
    return got


def few(tokens: int, **sizes: Any) -> ExpertsArguments:
    """Return arguments with enough CTAs to fill the GPU of these tests, and few tokens per expert."""
    return experts(tokens, **{"kind": "mxfp4", "shared": "e4m3", "inner": 384, "count": 12} | sizes)


@interpreted
@pytest.mark.parametrize("shared", ["", "e4m3"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 256, 384), (9, 384, 256), (16, 128, 128)])
def test_results_are_the_references(tokens: int, hidden: int, inner: int, shared: str) -> None:
    check(few(tokens, shared=shared, hidden=hidden, inner=inner, shared_inner=256, top_k=6), seed=tokens)


@interpreted
def test_parts_of_x_keep_more_than_bfloat16() -> None:
    call = few(9, hidden=256)
    assert error(check(call).float(), exact(call)) < 2e-3


@interpreted
def test_an_expert_of_more_tokens_than_a_tile_takes_several() -> None:
    check(few(20)._replace(ids=torch.tensor([[3, 7]], dtype=torch.int32).repeat(20, 1)))


@interpreted
def test_ids_outside_the_experts_add_nothing() -> None:
    call = few(12)
    for first in (0, 3):
        check(call._replace(ids=hostile_indices((12, 2), 15, dtype=torch.int64), first_expert=first), seed=first)
    nobody = torch.full((12, 2), -1, dtype=torch.int32)
    assert not check(call._replace(ids=nobody, shared_w13=None, shared_w2=None)).any()
    assert check(call._replace(ids=nobody)).any()
    check(call._replace(ids=torch.full_like(call.ids, 3)))


@interpreted
@pytest.mark.parametrize("form", [torch.float32, torch.float8_e8m0fnu])
def test_scales_of_the_shared_expert_come_in_every_form(form: torch.dtype) -> None:
    check(with_shared_scales(few(4, hidden=256, shared_inner=256), form))


@interpreted
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_every_e8m0_scale_means_its_power_of_two(name: str) -> None:
    call = few(2, hidden=128, count=2, inner=256, shared="", top_k=2)
    for byte in (*E8M0_BYTES, 15, 16, 143, 144):
        check(with_scale(call, name, byte))
    scale = getattr(call, f"{name}_scale")
    scale.copy_(torch.randint(0, 255, scale.shape))
    run(call)


@interpreted
def test_small_elements_beside_a_large_one_count() -> None:
    check(beside_a_large_element(few(4, shared="")))


@interpreted
def test_a_token_that_is_not_finite_is_nan_and_others_are_not() -> None:
    call = few(9, inner=256)
    x = 50 * call.x
    x[2, 5], x[4, 1], x[5, 2] = torch.nan, torch.inf, -torch.inf
    got = run(call._replace(x=x))
    lost = torch.tensor([2, 4, 5])
    assert got[lost].isnan().all()
    rest = torch.tensor([token for token in range(9) if token not in lost])
    assert_accurate(got[rest], call._replace(x=x[rest], ids=call.ids[rest], weights=call.weights[rest]))
    check(call._replace(x=0 * x.nan_to_num()))
    check(call._replace(x=x.nan_to_num() * 2.0**-140))


@interpreted
def test_a_scale_of_nan_is_not_infinity_which_a_clamp_would_hide() -> None:
    assert check(with_nan_scales(few(2, count=2, shared="", inner=256))).isnan().all()


@interpreted
def test_arguments_are_read_where_they_are() -> None:
    call = few(6)
    check(call._replace(x=padded(call.x), ids=strided(call.ids), weights=padded(call.weights)))
    check(call._replace(x=strided(call.x), ids=padded(call.ids.long()), weights=strided(call.weights)))


@interpreted
def test_results_do_not_depend_on_the_order_of_programs_nor_on_other_tokens() -> None:
    call = few(5, shared="e4m3")
    first = run(call, seed=1)
    assert_bitwise(run(call, seed=2), first)
    alone = call._replace(x=call.x[3:], ids=call.ids[3:], weights=call.weights[3:])
    assert_bitwise(run(alone), first[3:])


@triton.jit(do_not_specialize=["places", "first_expert", "tiles"])
def plan_kernel(p_tiles, p_ids, places, first_expert, tiles, PLAN: tl.constexpr):
    plan_some(p_tiles, p_ids, tl.program_id(0), places, first_expert, tiles, PLAN)


@interpreted
@pytest.mark.parametrize(("places", "count"), [(1, 3), (60, 7), (100, 300), (64, 1)])
def test_a_plan_has_every_place_of_an_expert_once_in_order(places: int, count: int) -> None:
    ids = hostile_indices((places,), count, fraction=0.2) + 5
    tiles = most_tiles(places, count, 8)
    plan = PlanShape(count, 16, 8, triton.next_power_of_2(max(16, places)), triton.next_power_of_2(tiles))
    with poisoned_empty(), checked(mutated=WRITTEN), random_order(places):
        planned = torch.empty(tiles, 10, dtype=torch.int32)
        plan_kernel[(-(-places // 16),)](planned, ids, places, 5, tiles, plan)
    by_expert: dict[int, list[int]] = {}
    for expert, number, *rows in planned.tolist():
        if expert >= 0:
            assert 1 <= number <= 8
            by_expert[expert] = by_expert.get(expert, []) + rows[:number]
    assert by_expert == places_by_expert(ids, 5, count)


def test_what_fits_is_few_places_an_expert_in_checkpoint_formats() -> None:
    gpu = Gpu("cuda", 90, 132)

    def weight(kind: str, rows: int, columns: int) -> Weight:
        dtype = {"mxfp4": torch.uint8, "e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}[kind]
        values = torch.empty(64, rows, columns // (2 if kind == "mxfp4" else 1), dtype=dtype)
        return Weight.of(values, torch.empty(64, 1, 4, dtype=torch.uint8) if kind != "bfloat16" else None)

    def fits(tokens: int, kind: str = "mxfp4", shared: str = "") -> bool:
        first, second = weight(kind, 4096, 128).shape, weight(kind, 128, 2048).shape
        pair = (weight(shared, 256, 128).shape, weight(shared, 128, 128).shape) if shared else None
        return sm90.fits(Problem(first, second, pair, 6, False), tokens, gpu)

    assert fits(8) and fits(85) and fits(8, shared="e4m3")
    assert not fits(1) and not fits(86) and not fits(200)
    assert not fits(8, kind="bfloat16")
    assert not fits(8, shared="bfloat16") and not fits(8, shared="mxfp4")


def test_every_code_of_e2m1_is_e4m3_with_the_exponent_of_the_unit() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    lower = ((codes << 2) & 0x1C) | ((codes << 4) & 0x80)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    assert torch.equal(lower.view(torch.float8_e4m3fn).float() * gemm.E2M1_UNIT.value, values[(codes & 15).long()])
