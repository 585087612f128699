"""The prefill kernels on a GPU against the reference on the same GPU: real sizes, hostile rows, lists, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import sparse_mla_prefill as scenario
from dsv4_compile.kernels.attention import sparse_mla_prefill
from dsv4_compile.kernels.attention.sparse_mla_prefill import IndexRows, PrefillCall
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import Tolerance, assert_close
from tests.gpu.attention.sparse_mla import BF16, CUDA, IS_HOPPER, garbage, on_gpu
from tests.ops.attention.test_sparse_mla_prefill import as_list, sample

__all__ = ["garbage"]  # a fixture for every test

# Weights are rounded to the dtype of the keys, by 2^-9 at most, and keys are below 5; few keys do not average it out.
FEW_KEYS = Tolerance(abs=5 * 2.0**-9, rel=3.01 / 128, cosine=1e-5)
# A score near zero is the rest of 512 products that cancel: its error is that of float32 sums of their size.
LOGITS = Tolerance(abs=1e-5, rel=8.01 / 65536, cosine=1e-8)

Result = tuple[Tensor, Tensor, Tensor]


def assert_same(
    got: Result, want: Result, tolerance: str | Tolerance = "attention_prefill_bfloat16", logits: Tolerance = LOGITS
) -> None:
    for a, b, label, bound in zip(got, want, ("out", "max_logits", "lse"), (tolerance, logits, logits), strict=True):
        assert_close(a, b, bound, label=label)


def call_of(args: tuple[Any, ...]) -> PrefillCall:
    """Return a call of either op."""
    q, kv, indices, bounds, scale, sink, *bound = args
    rows = IndexRows(indices, bounds, indices.shape[-1])
    if indices.dim() == 1:
        rows = IndexRows(indices, bounds, min(bound[0] or indices.shape[0], indices.shape[0]), ragged=True)
    return PrefillCall(q, kv, rows, scale, sink)


def by_triton(args: tuple[Any, ...]) -> Result:
    return sparse_mla_prefill.launch(call_of(args), gpu_of(CUDA))


def by_sm90(args: tuple[Any, ...]) -> Result:
    from dsv4_compile.kernels.attention import sparse_mla_prefill_sm90 as sm90

    assert sm90.why_unsupported(call_of(args)) == ""
    return sm90.launch(call_of(args), gpu_of(CUDA))


KERNELS = {"triton": by_triton, **({"sm90": by_sm90} if IS_HOPPER else {})}


def reference(args: tuple[Any, ...]) -> Result:
    return REFERENCES["sparse_mla_prefill" if args[2].dim() == 2 else "sparse_mla_prefill_ragged"](*args)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (2, 128), (131, 64), (257, 128), (1500, 64), (4096, 64)])
def test_full_rows_of_real_models(kernel: str, tokens: int, heads: int) -> None:
    args = scenario.arguments(tokens, heads, CUDA, tokens)
    got, some = KERNELS[kernel](args), torch.linspace(0, tokens - 1, min(tokens, 256), device=CUDA).long()
    want = reference((args[0][some], args[1], args[2][some], args[3][some], *args[4:]))
    assert_same(tuple(x[some] for x in got), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 65, 100])
@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_any_number_of_heads(kernel: str, tokens: int, heads: int) -> None:
    args = on_gpu(sample(tokens, heads, width=130, **BF16))
    assert_same(KERNELS[kernel](args), reference(args), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("heads", "width"), [*((64, width) for width in (0, 1, 63, 64, 65, 129, 640)), (128, 65), (128, 640)]
)
def test_hostile_rows_lengths_and_poisoned_workspaces(kernel: str, width: int, heads: int) -> None:
    args = sample(9000 // heads, heads, width=width, **BF16)
    dense, listed = on_gpu(args), on_gpu(as_list(args, width))
    got = KERNELS[kernel](dense)
    assert_same(got, reference(dense), FEW_KEYS)
    for a, b in zip(KERNELS[kernel](listed), got, strict=True):
        torch.testing.assert_close(a, b, atol=2 * FEW_KEYS.abs, rtol=2 * FEW_KEYS.rel)
    no_lens = (*dense[:3], None, *dense[4:])
    assert_same(KERNELS[kernel](no_lens), reference(no_lens), FEW_KEYS)
    no_sink = (*dense[:5], None)
    assert_same(KERNELS[kernel](no_sink), reference(no_sink), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("max_row", [0, 3, 200])
def test_offsets_outside_the_list(kernel: str, max_row: int) -> None:
    q, kv, indices, _, *rest = on_gpu(sample(7, 64, **BF16))
    indptr = torch.tensor([-(2**31), -4, 6, 6, 2, 19, 2**31 - 1, -9], device=CUDA)
    args = q, kv, indices.flatten()[:25], indptr, *rest, max_row
    assert_same(KERNELS[kernel](args), reference(args), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_keys_whatever_the_queries_hold(kernel: str) -> None:
    args = on_gpu(sample(600, 64, width=130, **BF16))
    empty = torch.arange(600, device=CUDA) % 3
    args[0][empty < 2] = torch.nan
    args[2][empty == 0] = torch.randint(-9, 0, (200, 130), device=CUDA).int()
    args[3].copy_(torch.where(empty == 1, -7, 130))
    out, top, lse = KERNELS[kernel](args)
    none = empty < 2
    assert (out[none] == 0).all() and (top[none] == -torch.inf).all() and (lse[none] == torch.inf).all()
    assert_same(tuple(x[~none] for x in (out, top, lse)), tuple(x[~none] for x in reference(args)), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [-torch.inf, -3.0, 3.0, torch.inf])
def test_sinks(kernel: str, sink: float) -> None:
    args = scenario.arguments(50, 64, CUDA, 1)
    args[5].fill_(sink)
    assert_same(KERNELS[kernel](args), reference(args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [4, 48, 64, 128, 256, 512])
def test_other_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    args = on_gpu(sample(9, 20, width=40, dim=dim, dtype=dtype))
    assert_same(by_triton(args), reference(args), "attention_float32" if dtype is torch.float32 else FEW_KEYS)


def test_the_op_takes_the_best_kernel_and_its_arguments_in_any_form() -> None:
    args = list(scenario.arguments(9, 64, CUDA, 1))
    want = reference(tuple(args))
    listed = as_list(tuple(a.cpu() if isinstance(a, Tensor) else a for a in args), 640)
    assert_same(launcher("sparse_mla_prefill")(*args), want)
    assert_same(torch.ops.dsv4.sparse_mla_prefill(*args), want)
    args[2:4] = (x.long() for x in args[2:4])
    assert_same(launcher("sparse_mla_prefill")(*args), want)
    args[0] = torch.nn.functional.pad(args[0], (0, 0, 0, 1))[:, :64]
    args[1] = torch.nn.functional.pad(args[1], (0, 16))[:, :512]
    assert_same(launcher("sparse_mla_prefill")(*args), want)
    assert_same(torch.ops.dsv4.sparse_mla_prefill_ragged(*on_gpu(listed)), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_seventy_thousand_tokens(kernel: str) -> None:
    q, kv, indices, _, *rest = scenario.arguments(64, 64, CUDA, 3)
    row = torch.arange(70_000, device=CUDA) % 64
    short = indices[:, :20].contiguous()
    want = reference((q, kv, short, None, *rest))
    got = KERNELS[kernel]((q[row], kv, short[row], None, *rest))
    assert_same(tuple(x[:64] for x in got), want, FEW_KEYS)
    for x in got:
        assert torch.equal(x, x[:64][row])


@pytest.mark.parametrize("kernel", KERNELS)
def test_workspaces_beyond_four_gibibytes(kernel: str) -> None:
    small = torch.randn(5000, 512, device=CUDA).bfloat16()
    first = 2**22 + 1000
    kv = torch.empty(first + 5000, 512, device=CUDA, dtype=torch.bfloat16)
    kv[first:] = small
    indices = torch.randint(0, 5000, (5, 300), device=CUDA, dtype=torch.int32)
    q = torch.randn(5, 64, 512, device=CUDA).bfloat16()
    rest = None, 512**-0.5, None
    assert_same(KERNELS[kernel]((q, kv, indices + first, *rest)), reference((q, small, indices, *rest)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (300, 128), (1000, 64)])
def test_a_hundred_repeats_are_equal_bit_by_bit(kernel: str, tokens: int, heads: int) -> None:
    args = scenario.arguments(tokens, heads, CUDA, 5)
    first = KERNELS[kernel](args)
    for _ in range(100):
        for got, want in zip(KERNELS[kernel](args), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_follows_its_buffers_and_never_waits(kernel: str) -> None:
    args = scenario.arguments(150, 64, CUDA, 6)
    args[3].fill_(640)
    KERNELS[kernel](args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = KERNELS[kernel](args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for length in (128, 0, 65, 1, 640):
        args[0].normal_()
        args[2].copy_(torch.randint(-1, args[1].shape[0], args[2].shape, device=CUDA))
        args[3].fill_(length)
        graph.replay()
        for got, want in zip(captured, KERNELS[kernel](args), strict=True):
            assert torch.equal(got, want)
        assert_same(captured, reference(args), FEW_KEYS)


@pytest.mark.parametrize("scale", [0.0, -0.05, 3.0])
def test_any_scale(scale: float) -> None:
    args = list(scenario.arguments(50, 64, CUDA, 1))
    args[4] = scale
    assert_same(launcher("sparse_mla_prefill")(*args), reference(tuple(args)), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("factor", [30.0, -3.0, 1e3])
def test_scores_far_from_zero(kernel: str, tokens: int, factor: float) -> None:
    """Some tokens have large scores on both sides of zero, or all of a row far below it."""
    args = list(on_gpu(sample(tokens, 65, width=130, **BF16)))
    if factor < 0:
        args[1][:] = args[1][:1]
        args[0][:] = factor * args[1][0]
    args[0][::4] *= abs(factor)
    near = KERNELS[kernel](tuple(args))
    logits = replace(LOGITS, abs=LOGITS.abs * abs(factor))  # the terms that cancel are so much larger
    assert_same(near, reference(tuple(args)), Tolerance(abs=5 * 2.0**-9, rel=4.01 / 128, cosine=1e-5), logits)
    args[0][::4] = 0
    for a, b in zip(KERNELS[kernel](tuple(args)), near, strict=True):
        assert torch.equal(a[1::4], b[1::4])


def test_empty_batches() -> None:
    q, *rest = scenario.arguments(2, 64, CUDA, 0)
    out, top, lse = launcher("sparse_mla_prefill")(q[:0], *rest)
    assert out.shape == (0, 64, 512) and top.shape == lse.shape == (0, 64)
