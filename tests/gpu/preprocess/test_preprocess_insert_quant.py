"""`preprocess_insert_quant` on a GPU: the latents that `preprocess_insert` gives there, quantised, but for ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import preprocess_insert as scenario
from dsv4_compile.bench import steps
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.kernels.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.common.block_scale import quantize_rows
from dsv4_compile.testing import assert_bitwise
from tests.gpu.linear import products
from tests.gpu.preprocess.test_preprocess_insert import KIND, Step, storage_of

OP = "preprocess_insert_quant"
preprocess_insert, preprocess_insert_quant = launcher("preprocess_insert"), launcher(OP)
WQ_B = "Flash fp8_linear wq_b"
SMALL = pytest.mark.parametrize("kind", ["swa", "hca", "csa"])


FEW_TIES, TIES = 2, 1e-5
"""Values that may be neighbours: squares are added in a different order, and a latent rounds to its neighbour."""


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert_bitwise(got[1], want[1])
    ours, theirs = (values.view(torch.uint8).int() for values, _ in (got, want))
    wrong = (ours - theirs).abs()
    assert wrong.max() <= 1 if wrong.numel() else True
    assert wrong.sum() <= FEW_TIES + TIES * wrong.numel()


def assert_agree(step: Step) -> tuple[Tensor, Tensor]:
    (got, mine), (latents, theirs) = step.run(preprocess_insert_quant), step.run(preprocess_insert)
    check(got, quantize_rows(latents))
    for name, cache in theirs.items():
        assert_bitwise(storage_of(mine[name]), storage_of(cache), label=name)
    return got


@KIND
@pytest.mark.parametrize("tokens", [1, 2, 7, 130, 1025, 5000])
def test_a_step_is_the_quantised_one_of_the_other_op(kind: str, tokens: int) -> None:
    step = Step(kind, tokens)
    got = assert_agree(step)
    for result, expected in zip(got, step.run(REFERENCES[OP])[0], strict=True):
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)


@SMALL
def test_rows_of_zeros_and_nan_and_the_smallest_keep_to_themselves(kind: str) -> None:
    step = Step(kind, 40)
    qr = step.arguments["qr"].clone()
    qr[1], qr[2] = 0, 1e-30
    qr[3, 7], qr[4, 9] = torch.nan, torch.inf
    step.arguments["qr"] = qr
    values, scale = assert_agree(step)
    assert not values[1].float().any()
    assert values[3].float().isnan().all() and (scale[3] == 2.0**127).all()
    assert values[5:].float().isfinite().all()


@SMALL
def test_a_captured_launch_follows_its_inputs(kind: str) -> None:
    step = Step(kind, 40)
    preprocess_insert_quant(**step.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = preprocess_insert_quant(**step.arguments)
    for seed in (5, 6):
        fresh = Step(kind, 40, seed)
        want, _ = fresh.run(preprocess_insert_quant)
        for name in ("qr", "kv", "kv_score", "indexer_kv_score", "q_weight"):
            if name in fresh.arguments:
                step.arguments[name].copy_(fresh.arguments[name])
        graph.replay()
        for a, b in zip(out, want, strict=True):
            assert_bitwise(a, b)


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 40, 64, 65, 130, 300, 512, 700])
def test_the_product_takes_it_as_it_is(tokens: int) -> None:
    """By every kernel for quantised operands: what it gives for the same operands laid out anew."""
    args = scenario.build(steps.StepInputs(DeepseekV4Config.flash(), tokens, 1024, products.CUDA, 0), 0)
    weight, weight_scale = products.arguments(WQ_B, 1)[1:3]
    values, scale = preprocess_insert_quant(*args)
    operands = values, scale, weight, weight_scale
    products.check("fp8_grouped_einsum", fp8_grouped_einsum, operands)
    assert_bitwise(fp8_grouped_einsum(*operands), fp8_grouped_einsum(values.clone(), scale.clone(), *operands[2:]))


def test_a_step_of_nothing_changes_nothing() -> None:
    args = list(scenario.build(steps.StepInputs(DeepseekV4Config.flash(), 4, 1024, torch.device("cuda"), 0), 0))
    before = args[9].clone()
    for i in (0, 1, 10):
        args[i] = args[i][:0]
    values, scale = preprocess_insert_quant(*args)
    assert values.shape == (0, 1, 1024) and scale.shape == (0, 1, 8)
    assert torch.equal(args[9], before)
