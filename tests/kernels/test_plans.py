"""Plans of launchers: what they decide for sizes of the models, and that a variant is what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.runtime import JITFunction

from dsv4_compile.kernels.attention import sparse_mla_decode_triton
from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.host.plans import Plan, variants
from dsv4_compile.kernels.linear import gemm
from dsv4_compile.kernels.moe import moe_experts
from dsv4_compile.kernels.moe.expert_operands import Problem, WeightShape
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, LatentDecodeArguments
from tests.kernels.gpus import GPUS
from tests.kernels.moe.problems import experts
from tests.tools import fingerprint, fingerprint_calls
from tests.tools.fingerprint_source import specialized

HOPPER, MI300 = Gpu("cuda", 90, 132), Gpu("hip", 0, 304)


TARGETS = ("sm_90", "sm_120", "gfx942")


class Planned(NamedTuple):
    """An op with a plan: the arguments of a call of so many tokens, and its plan on a GPU."""

    op: str
    arguments: Callable[[int], tuple[Any, ...]]
    plan: Callable[[int, Gpu], Plan]
    targets: tuple[str, ...] = TARGETS
    """GPUs of `TARGETS` with a planned kernel; the kernels of others have no plan."""


def of_experts(kind: str, shared: str = "", **sizes: int) -> Planned:
    call = experts(1, kind=kind, shared=shared, hidden=256, inner=256, shared_inner=256, **sizes)
    top_k = call.ids.shape[1]

    def arguments(tokens: int) -> tuple[Any, ...]:
        x, ids, weights = torch.empty(tokens, 256), torch.empty(tokens, top_k), torch.empty(tokens, top_k)
        return tuple(call._replace(x=x.bfloat16(), ids=ids.int(), weights=weights))

    problem = moe_experts.problem_of(call)
    return Planned("moe_experts", arguments, lambda tokens, gpu: moe_experts.plan(problem, tokens, gpu))


def of_decode(heads: int, entries: int, invariant: bool = False) -> Planned:
    def arguments(tokens: int) -> tuple[Any, ...]:
        return fingerprint_calls._decode(tokens, heads, entries, invariant=invariant, fmt="fp8")

    call = decode_call(DecodeArguments(*arguments(1)))
    problem = sparse_mla_decode_triton.problem_of(call)
    return Planned("sparse_mla_decode", arguments, lambda *sizes: sparse_mla_decode_triton.plan(problem, *sizes))


def of_latent(heads: int, width: int) -> Planned:
    def arguments(tokens: int) -> tuple[Any, ...]:
        q, cache = torch.empty(tokens, heads, 576).bfloat16(), torch.empty(3, 64, 576).bfloat16()
        return q, cache, torch.empty(tokens, width).int(), torch.empty(tokens).int(), 64, 0.1, 512

    problem = sparse_mla_decode_triton.latent_problem_of(LatentDecodeArguments(*arguments(1)))
    return Planned("sparse_mla_decode_latent", arguments, lambda *sizes: sparse_mla_decode_triton.plan(problem, *sizes))


def of_linear(groups: int, rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Planned:
    weight = torch.empty(groups * rows, size, dtype=dtype)

    def arguments(tokens: int) -> tuple[Any, ...]:
        return torch.empty(tokens, groups, size, dtype=dtype), weight, groups

    problem = gemm.Problem(groups, rows, size, dtype, dtype, quantize=False, scaled=False)
    return Planned("grouped_linear", arguments, lambda *sizes: gemm.plan(problem, *sizes), ("sm_120", "gfx942"))


PLANNED: Mapping[str, Callable[[], Planned]] = {
    "experts in bfloat16": lambda: of_experts("bfloat16", "bfloat16"),
    "experts in MXFP4, shared e4m3": lambda: of_experts("mxfp4", "e4m3", count=300, top_k=6),
    "interleaved experts": lambda: of_experts("interleaved", count=16),
    "decode of many heads": lambda: of_decode(128, 512),
    "decode of few heads, any batch": lambda: of_decode(8, 2048, invariant=True),
    "linear of groups": lambda: of_linear(8, 128, 4096),
    "linear in float32": lambda: of_linear(1, 200, 300, torch.float32),
    "decode of latents": lambda: of_latent(16, 1024),
}
TOKENS = (*range(1, 41, 3), 64, 85, 86, 128, 129, 170, 171, 340, 512, 513, 700, 1024, 1025, 2048, 4000)


@contextmanager
def compiled_keys(target: str) -> Iterator[list[Any]]:
    """Collect what every launch of the block is compiled for, in place of launching."""
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANNED)
def test_calls_of_equal_variants_are_compiled_alike_and_others_are_not(name: str, target: str) -> None:
    planned, gpu = PLANNED[name](), GPUS[target][0]
    if target not in planned.targets:
        target, gpu = "sm_100", GPUS["sm_100"][0]
    compiled: dict[Any, set[Any]] = {}
    for tokens in TOKENS:
        with compiled_keys(target) as keys:
            launcher(planned.op)(*planned.arguments(tokens))
        compiled.setdefault(planned.plan(tokens, gpu).variant, set()).add(frozenset(keys))
    assert [len(keys) for keys in compiled.values()] == [1] * len(compiled)
    assert len(set.union(*compiled.values())) == len(compiled)
    assert set(variants(lambda tokens: planned.plan(tokens, gpu), TOKENS)) == set(compiled)


def test_a_gemm_splits_k_until_its_tiles_fill_the_gpu() -> None:
    problem = gemm.Problem(8, 1024, 4096, torch.bfloat16, torch.bfloat16, quantize=False, scaled=False)
    one, many = (gemm.plan(problem, tokens, MI300) for tokens in (1, 512))
    assert (one.tiling.block_m, one.tiles, one.tiling.splits, one.k_blocks_each) == (16, 128, 4, 16)
    assert (many.tiling.block_m, many.tiling.splits, many.operand) == (128, 1, tl.bfloat16)


def test_keys_of_a_decode_are_split_until_tokens_fill_the_gpu() -> None:
    problem = sparse_mla_decode_triton.Problem(64, 512, (128, 512), torch.bfloat16)
    one, few, many = (sparse_mla_decode_triton.plan(problem, tokens, HOPPER) for tokens in (1, 30, 200))
    assert one.tiles == sparse_mla_decode_triton.Tiles(64, 64, 8)
    assert [plan.split.splits for plan in (one, few, many)] == [10, 4, 1]
    assert [plan.pdl for plan in (one, few, many)] == [True, True, False]
    assert few.grid(30) == (120,) and sparse_mla_decode_triton.plan(problem, 1, MI300).tiles.block_n == 16
    needed = variants(lambda tokens: sparse_mla_decode_triton.plan(problem, tokens, HOPPER), range(1, 513))
    assert [*needed.values()] == [1, 14, 27, 34, 45, 67]


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
