"""Kernels that claim batch invariance: what they are compiled for, and how they split sums, follows from no size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime import JITFunction

from dsv4_compile.bench import gemm as bench_gemm
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.linear import gemm, gemm_sm90_small
from dsv4_compile.kernels.moe import moe_experts
from dsv4_compile.kernels.moe.expert_operands import Problem, WeightShape
from dsv4_compile.kernels.moe.moe_experts_sm90_few_tokens import FewTokensPlan
from dsv4_compile.ops.common import kernels
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.invariance import (
    AS_IT_IS,
    CLAIMS,
    PINNED,
    STEP,
    STEP_TOKENS,
    TOKENS,
    Invariance,
    is_large,
    row_places,
)
from dsv4_compile.runtime.bucket_sizes import MOST_TOKENS, request_buckets, token_buckets
from dsv4_compile.testing.invariant_rows import check_rows
from dsv4_compile.testing.samples import op_samples
from tests.tools import fingerprint

LONG = bool(os.environ.get("DSV4_LONG"))
HOPPER = Gpu("cuda", 90, 132)
LAYERS = {
    f"{model} {x.op} {x.name}": x for model, config in bench_gemm.MODELS.items() for x in bench_gemm.layers(config)
}
CLAIMED = sorted(op for op, claims in CLAIMS.items() if claims.kernel)
SIZES = (1, 2, 8, 9, 17, 33, 65, 130, 257, 600, 1100)
"""Rows at and around the limits of launchers."""
FREE = {
    "PDL": "when the next kernel starts",
    "launch_pdl": "the same",
    "APART": "tokens of a program that computes coefficients",
    "PLAN": "how a program finds its places",
    "PLACES_POW2": "places that a program looks at",
    "maxnreg": "registers",
}
"""Compile-time arguments that place work and change no sum."""
FIELDS = r"(?<=PoolShape\()(.*?)tokens=\d+|\b(?:followed|main_pools|key_pools)=\w+"
"""Fields of such arguments: tokens that a program looks for closed groups in, and PDL."""
PLANNING = ("count_places_kernel", "sort_places_kernel")
"""Kernels of integers."""
WITHOUT_SUMS = ("inv_rope", "inv_rope_fp8_quant")
"""Ops of single elements and maxima, launched without contraction."""
SUMS_IN_CHUNKS = ("moe_route",)
"""Ops with two tilings that add the same chunks in the same order, see the docstring of the kernel."""


def rows_of(op: str, args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the arguments of a call of `count` rows of a sample."""
    declared = OPS[op]._schema.arguments
    places, names = row_places(op, declared), [argument.name for argument in declared]
    most = min(args[i].shape[0] for i in places if i < len(args) and isinstance(args[i], Tensor))
    grouped = [names.index(name) for name in CLAIMS[op].grouped]
    values = list(args)
    for i in (*places, *grouped):
        if i < len(args) and isinstance(args[i], Tensor):
            group = args[i].shape[0] // most if i in grouped else 1
            rows = (torch.arange(count)[:, None] % most * group + torch.arange(group)).flatten()
            bits = args[i].view(torch.uint8) if args[i].dtype.itemsize == 1 else args[i]
            values[i] = bits.index_select(0, rows).view(args[i].dtype)
    return tuple(values)


@contextmanager
def compiled_keys() -> Iterator[list[Any]]:
    """Collect launched kernels with their compile-time arguments on Hopper, without those of FREE."""
    keys: list[Any] = []

    def note(function: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        constants = {name: value for name, value in options.items() if name not in FREE}
        if function.__name__ not in PLANNING:
            keys.append((function.__name__, re.sub(FIELDS, r"\1", str(constants))))
        return mock.MagicMock(metadata=mock.Mock(shared=0), packed_metadata=(4, 1, 0))

    with (
        fingerprint._seen_as("sm_90", fingerprint._kernel_modules()),
        mock.patch.object(JITFunction, "run", note),
    ):
        yield keys


def differing_launches(op: str, launcher: Any) -> dict[int, list[Any]]:
    """Return what calls of an op's samples launch, by their number of rows, if it differs from that of most rows."""
    seen = 0
    for sample in op_samples(op):
        if not sample[row_places(op, OPS[op]._schema.arguments)[0]].shape[0]:
            continue
        launched: dict[int, list[Any]] = {}
        with compiled_keys() as keys:
            refuses = kernels.refusal(op)
            for count in SIZES:
                keys.clear()
                call = rows_of(op, sample, count)
                if refuses is None or not refuses(*call):
                    launcher(*call)
                launched[count] = sorted(set(keys))
        seen += len(launched[1])
        differing = {count: keys for count, keys in launched.items() if keys != launched[SIZES[-1]]}
        if differing:
            return differing
    assert seen, "no sample launches a kernel"
    return {}


@pytest.mark.parametrize("op", sorted({*CLAIMED} - {*WITHOUT_SUMS, *SUMS_IN_CHUNKS}))
def test_calls_of_all_sizes_run_the_same_kernels(op: str) -> None:
    assert differing_launches(op, kernels.invariant_launcher(op)) == {}


@pytest.mark.parametrize("op", ["fp8_linear", "grouped_linear", "mhc_boundary", "moe_experts"])
def test_launchers_that_tile_by_the_number_of_rows_are_seen(op: str) -> None:
    assert differing_launches(op, kernels.launcher(op))


@pytest.mark.parametrize("sizes", [(1, 32768, 1024), (1, 2112, 4096), (8, 1024, 4096), (1, 129280, 4096)])
@pytest.mark.parametrize("weight", [torch.float8_e4m3fn, torch.bfloat16])
def test_k_is_split_by_the_weight_alone(sizes: tuple[int, int, int], weight: torch.dtype) -> None:
    problem = gemm.Problem(*sizes, weight, weight, quantize=False, scaled=weight.itemsize == 1, invariant=True)
    plans = [gemm.plan(problem, tokens, HOPPER) for tokens in (*SIZES, gemm.INVARIANT_PASS)]
    assert len({(plan.variant, plan.tiling, plan.k_blocks_each) for plan in plans}) == 1
    by_speed = [gemm.plan(problem._replace(invariant=False), tokens, HOPPER) for tokens in SIZES]
    assert len({(plan.tiling, plan.k_blocks_each) for plan in by_speed}) > 1


def test_experts_of_a_real_model_have_one_tiling() -> None:
    w13, w2 = WeightShape(256, 4096, 4096, "mxfp4", True), WeightShape(256, 4096, 2048, "mxfp4", True)
    shared = WeightShape(1, 4096, 4096, "e4m3", True), WeightShape(1, 4096, 2048, "e4m3", True)
    problem = Problem(w13, w2, shared, 6, False)
    plans = [moe_experts.plan(problem, tokens, HOPPER, TOKENS) for tokens in (*SIZES, moe_experts.INVARIANT_PASS)]
    constants = {(plan.gate_up[1:5], plan.down[1:5], plan.exact, plan.sums) for plan in plans}
    assert len(constants) == 1
    fastest = {tokens: type(moe_experts.plan(problem, tokens, HOPPER)) for tokens in SIZES}
    assert fastest[1] is FewTokensPlan and len(set(fastest.values())) == 3, "without a claim, plans follow the size"
    most = moe_experts.most_tokens(problem, HOPPER, STEP)
    few = [moe_experts.plan(problem, tokens, HOPPER, STEP) for tokens in (*range(1, most, 13), most)]
    assert len({(plan.gate_up_tile, plan.down_tile, plan.shared_tile, plan.split_shape.hidden) for plan in few}) == 1


def test_padding_to_a_bucket_leaves_a_step_a_step() -> None:
    for count in range(1, STEP_TOKENS + 1):
        for most in (STEP_TOKENS, 1000, MOST_TOKENS):
            padded = next(size for size in token_buckets(most) if size >= count)
            assert not is_large(STEP, padded)
        assert not is_large(STEP, next(size for size in request_buckets(MOST_TOKENS) if size >= count))


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_step_splits_k_by_the_weight_alone(name: str) -> None:
    layer, small = LAYERS[name], gemm_sm90_small
    dtype = torch.bfloat16 if layer.op == "grouped_linear" else torch.float8_e4m3fn
    weight = torch.empty(layer.groups * layer.rows, layer.size, dtype=dtype, device="meta")
    splits = set()
    for tokens in (*SIZES, STEP_TOKENS):
        x = torch.empty(tokens, layer.groups, layer.size, dtype=dtype, device="meta")
        tiling, k_blocks = small.tiling_of(x, weight, HOPPER, False, pinned=True)
        assert small.ring_depth(tiling, small.block_of(tokens), k_blocks, False) >= 1
        splits.add((tiling.splits, k_blocks))
    assert len(splits) == 1


def test_every_claim_of_a_kernel_is_for_an_op_with_one_and_pins_exist() -> None:
    for op in CLAIMED:
        assert op in kernels.KERNELS and CLAIMS[op].rows and CLAIMS[op].kernel in (AS_IT_IS, PINNED)
        assert callable(kernels.invariant_launcher(op))
    assert Invariance() == ((), (), False, False, "", "", "")


@pytest.mark.interpreted
@pytest.mark.parametrize("op", sorted({*CLAIMED}) if LONG else ["mhc_pre"])
def test_rows_have_the_bits_that_they_have_alone(op: str) -> None:
    declared = OPS[op]._schema.arguments
    written = [i for i, argument in enumerate(declared) if argument.alias_info is not None]
    grouped = [i for i, argument in enumerate(declared) if argument.name in CLAIMS[op].grouped]
    refuses = kernels.refusal(op)
    for sample in op_samples(op):
        if refuses is None or not refuses(*sample):
            check_rows(
                kernels.invariant_launcher(op), sample, row_places(op, declared), grouped=grouped, written=written,
                compositions=4 if LONG else 1, generator=torch.Generator().manual_seed(0), label=op,
            )  # fmt: skip
            if not LONG:
                return
