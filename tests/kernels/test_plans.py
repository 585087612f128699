"""Plans of launchers: what they decide for sizes of the models, and that a variant is what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from triton.runtime import JITFunction

from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.host.plans import Plan, variants
from dsv4_compile.kernels.moe import moe_experts
from dsv4_compile.kernels.moe.expert_operands import Problem, WeightShape
from dsv4_compile.ops.common.kernels import launcher
from tests.kernels.gpus import GPUS
from tests.kernels.moe.problems import experts
from tests.tools import fingerprint
from tests.tools.fingerprint_source import specialized

HOPPER, MI300 = Gpu("cuda", 90, 132), Gpu("hip", 0, 304)


class Planned(NamedTuple):
    """An op with a plan: the arguments of a call of so many tokens, and its plan on a GPU."""

    op: str
    arguments: Callable[[int], tuple[Any, ...]]
    plan: Callable[[int, Gpu], Plan]


def of_experts(kind: str, shared: str = "", **sizes: int) -> Planned:
    call = experts(1, kind=kind, shared=shared, hidden=256, inner=256, shared_inner=256, **sizes)
    top_k = call.ids.shape[1]

    def arguments(tokens: int) -> tuple[Any, ...]:
        x, ids, weights = torch.empty(tokens, 256), torch.empty(tokens, top_k), torch.empty(tokens, top_k)
        return tuple(call._replace(x=x.bfloat16(), ids=ids.int(), weights=weights))

    problem = moe_experts.problem_of(call)
    return Planned("moe_experts", arguments, lambda tokens, gpu: moe_experts.plan(problem, tokens, gpu))


PLANNED: Mapping[str, Callable[[], Planned]] = {
    "experts in bfloat16": lambda: of_experts("bfloat16", "bfloat16"),
    "experts in MXFP4, shared e4m3": lambda: of_experts("mxfp4", "e4m3", count=300, top_k=6),
    "interleaved experts": lambda: of_experts("interleaved", count=16),
}
TOKENS = (*range(1, 41, 3), 64, 85, 86, 128, 129, 170, 171, 340, 512, 513, 700, 1024, 1025, 2048, 4000)


@contextmanager
def compiled_keys(target: str) -> Iterator[list[Any]]:
    """Collect what each launch of the block is compiled for, in place of launching."""
    keys: list[Any] = []

    class Compiled:
        metadata, packed_metadata = mock.Mock(shared=0), (4, 1, 0)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *values: None

    def note(function: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        keys.append((function.__name__, str(specialized(function, values, options))))
        return Compiled()

    with fingerprint._seen_as(target, fingerprint._kernel_modules()), mock.patch.object(JITFunction, "run", note):
        yield keys


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("name", PLANNED)
def test_calls_of_equal_variants_are_compiled_alike_and_others_are_not(name: str, target: str) -> None:
    planned, gpu = PLANNED[name](), GPUS[target][0]
    compiled: dict[Any, set[Any]] = {}
    for tokens in TOKENS:
        with compiled_keys(target) as keys:
            launcher(planned.op)(*planned.arguments(tokens))
        compiled.setdefault(planned.plan(tokens, gpu).variant, set()).add(tuple(keys))
    assert [len(keys) for keys in compiled.values()] == [1] * len(compiled)
    assert len(set.union(*compiled.values())) == len(compiled) > 1
    assert set(variants(lambda tokens: planned.plan(tokens, gpu), TOKENS)) == set(compiled)


FLASH = Problem(
    WeightShape(256, 4096, 4096, "mxfp4", True), WeightShape(256, 4096, 2048, "mxfp4", True), None, 6, False
)
"""Routed experts of V4-Flash as in a checkpoint."""


def test_experts_of_flash_are_split_for_few_tokens_on_hopper_and_sorted_for_many() -> None:
    few, many = (moe_experts.plan(FLASH, tokens, HOPPER) for tokens in (32, 4096))
    assert isinstance(few, moe_experts.sm90.SplitPlan) and isinstance(many, moe_experts.ExpertsPlan)
    assert (few.tiles, few.split_pdl, few.gate_up_pdl, few.gate_up_tile.tokens) == (192 // 8 + 192, True, False, 8)
    assert (many.lists, many.sort, many.sums, many.exact) == (moe_experts.PLAN_TILES, 48, False, False)
    assert (many.gate_up.tile.rows, many.gate_up.tile.tokens, many.gate_up.warps) == (128, 128, 4)
    assert moe_experts.plan(FLASH, 32, MI300).gate_up.tile.tma is False


def test_variants_of_a_range_name_the_first_tokens_that_need_them() -> None:
    first = variants(lambda tokens: moe_experts.plan(FLASH, tokens, HOPPER), range(1, 2049))
    assert [*first.values()] == sorted(first.values()) and first[moe_experts.plan(FLASH, 1, HOPPER).variant] == 1
    for variant, tokens in first.items():
        assert moe_experts.plan(FLASH, tokens, HOPPER).variant == variant
        assert tokens == 1 or moe_experts.plan(FLASH, tokens - 1, HOPPER).variant != variant


def test_a_plan_is_a_function_of_its_arguments_and_prints_itself() -> None:
    first = moe_experts.plan(FLASH, 4096, HOPPER)
    moe_experts.plan.cache_clear()
    assert moe_experts.plan(FLASH, 4096, HOPPER) == first
    assert "gate_up=GemmPlan(programs=" in str(first) and "Tensor" not in str(first)
