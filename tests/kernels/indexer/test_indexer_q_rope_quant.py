"""The indexer's query kernel against the reference, to the bit, every access checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_q_rope_quant as kernel
from dsv4_compile.reference.indexer.indexer_q_rope_quant import indexer_q_rope_quant as reference
from dsv4_compile.testing import assert_bitwise, assert_close, hostile_values, padded, strided
from dsv4_compile.testing.compare import Tolerance
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.ops.preprocess.compressor_engine import rope_table
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
OUTPUTS = ("tensors[0]", "tensors[1]", "tensors[2]")


def arguments(tokens: int, heads: int, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    q = (torch.randn(tokens, heads, dim) * torch.rand(tokens, heads, 1) * 8).to(dtype)
    return q, torch.randint(40, (tokens,)), rope_table(40, dim // 2), torch.randn(tokens, heads).to(dtype)


def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    with checked(mutated=OUTPUTS):
        return kernel.indexer_q_rope_quant(*args, **options)


def compare(*args: Any, **options: Any) -> None:
    for name, ours, theirs in zip(("q", "q_scale", "weights"), run(*args, **options), reference(*args), strict=True):
        assert_bitwise(ours, theirs, strides=True, label=name)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("indexer_q_rope_quant"))))
def test_samples(number: int) -> None:
    args = op_samples("indexer_q_rope_quant")[number]
    if len(args) < 6 or not args[5]:
        compare(*args)
    assert kernel.why_unsupported_indexer_q_rope_quant(*args) == ""


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@FORMATS
@pytest.mark.parametrize(("tokens", "heads"), [(3, 64), (1, 1), (2, 19), (5, 16), (0, 64), (2, 0)])
def test_any_number_of_tokens_and_heads(fmt: str, tokens: int, heads: int) -> None:
    if heads:
        compare(*arguments(tokens, heads), fmt)
    assert [x.shape[:2] for x in run(*arguments(tokens, heads), fmt)] == [(tokens, heads)] * 3


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@FORMATS
def test_other_dtypes(fmt: str, dtype: torch.dtype) -> None:
    compare(*arguments(4, 8, dtype=dtype), fmt)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@FORMATS
def test_weights_are_rounded_as_by_a_cast_before(fmt: str, dtype: torch.dtype) -> None:
    q, positions, table, _ = arguments(4, 8, dtype=dtype)
    weights = torch.randn(4, 8) * 1.01
    weights[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    compare(q, positions, table, weights, fmt, False, True)
    want = reference(q, positions, table, weights.to(dtype), fmt)
    for ours, theirs in zip(run(q, positions, table, weights, fmt, False, True), want, strict=True):
        assert_bitwise(ours, theirs)


@interpreted
@pytest.mark.parametrize(("dim", "rope"), [(64, 16), (32, 32), (16, 0), (2, 2)])
def test_plain_queries_of_any_power_of_two(dim: int, rope: int) -> None:
    q, positions, _, weights = arguments(3, 5, dim, torch.float32)
    compare(q, positions, rope_table(40, rope), weights, "plain")


@interpreted
@pytest.mark.parametrize("tile", [(1, 1), (4, 1), (32, 4), (64, 8)])
def test_tiles_do_not_change_the_result(tile: tuple[int, int]) -> None:
    for fmt in layout.INDEXER_FORMATS:
        compare(*arguments(2, 37), fmt, tile=tile)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@FORMATS
def test_any_strides(fmt: str, spread: Callable[[Tensor], Tensor]) -> None:
    compare(*(spread(x) for x in arguments(3, 6)), fmt)


@interpreted
@FORMATS
def test_positions_beyond_the_table_and_spare_positions(fmt: str) -> None:
    q, _, table, weights = arguments(8, 4)
    compare(q, torch.tensor([*hostile_values(40), *range(8)])[:12], table, weights, fmt)


@interpreted
@pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
def test_special_values(fmt: str) -> None:
    """Zeros of both signs, subnormal and huge rows, every midpoint of e2m1, infinities."""
    q, positions, table, weights = arguments(9, 4)
    q[0] = 0.0
    q[1] = -0.0
    q[2] *= 2.0**-126
    q[3] *= 2.0**119
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    q[4, :, :64] = torch.cat((midpoints, -midpoints)).repeat(4).bfloat16()
    q[4, :, 64:] = 0.0
    q[5, 0, 3], q[6, 1, 70] = torch.inf, -torch.inf
    q[7] *= 1e-30
    weights[8] = torch.nan
    compare(q, positions, table, weights, fmt)


@interpreted
@FORMATS
def test_a_nan_stays_within_its_scale(fmt: str) -> None:
    """Which NaN it is may differ."""
    q, positions, table, weights = arguments(2, 3)
    q[1, 1, 5] = torch.nan
    ours, theirs = run(q, positions, table, weights, fmt), reference(q, positions, table, weights, fmt)
    for got, want in zip(ours, theirs, strict=True):
        if got.dtype is torch.uint8:
            assert_bitwise(got, want)
        else:
            assert_close(got.float(), want.float(), Tolerance(0.0, 0.0, 0.0))


@interpreted
@FORMATS
def test_hadamard_transform(fmt: str) -> None:
    """Small integers and no rotation: every sum is exact, so every bit is defined."""
    q = torch.randint(-4, 5, (3, 20, 128)).bfloat16()
    table = torch.cat((torch.ones(4, 32), torch.zeros(4, 32)), dim=1)
    compare(q, torch.arange(3), table, torch.randn(3, 20), fmt, True)


@interpreted
@pytest.mark.parametrize("dim", [16, 64])
def test_hadamard_transform_of_float32_is_not_rounded(dim: int) -> None:
    args = (*arguments(2, 3, dim, torch.float32), "plain", True)
    # The reference's GEMM adds up 64 values of some tens in an order that depends on the CPU; bfloat16 is 1e-2 off.
    assert_close(run(*args)[0], reference(*args)[0], Tolerance(abs=1e-5, rel=1e-5, cosine=1e-12))


def test_unsupported_calls_name_the_limit() -> None:
    assert "power of two" in kernel.why_unsupported_indexer_q_rope_quant(*arguments(1, 1, 24), "plain")
    assert "Hadamard" in kernel.why_unsupported_indexer_q_rope_quant(*arguments(1, 1, 8), "plain", True)
    assert kernel.why_unsupported_indexer_q_rope_quant(*arguments(1, 1), "indexer_fp8", True) == ""


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    variants = shared_out(list(itertools.product(layout.INDEXER_FORMATS, (False, True))))[target]
    with compiled_for(target) as compiled:
        for fmt, transform in variants:
            kernel.indexer_q_rope_quant(*arguments(2, 64), fmt, transform)
    assert len(compiled) == len(variants)
    assert all(binary.assembled for binary in compiled)
    assert all(begins_early(binary) == early for binary in compiled)
