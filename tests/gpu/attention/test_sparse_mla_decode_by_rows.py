"""Attention of many tokens over dequantised rows on sm_90: results of the ops that use it, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.attention.sparse_mla_decode import MIN_TOKENS_BY_ROWS, why_unsupported_by_rows
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from dsv4_compile.testing import assert_bitwise, assert_close, poisoned_empty
from tests.gpu.attention.sparse_mla import CUDA, FEW_KEYS, IS_HOPPER, NORMED_LSE

TOKENS = MIN_TOKENS_BY_ROWS + 77
sparse_mla_decode, sparse_mla_decode_quant = launcher("sparse_mla_decode"), launcher("sparse_mla_decode_quant")


def arguments(fused: str, heads: int) -> tuple[Any, ...]:
    """Return rows of any length, with invalid slots, of caches with unwritten pages."""
    args = list(scenario.fused_arguments(fused, TOKENS, heads, CUDA, heads, pool=8 * TOKENS))
    args[1] = args[1][: 4 * TOKENS // scenario.BLOCK].clone()
    slots = args[1].shape[0] * scenario.BLOCK
    args[2] = torch.randint(-9, slots + 9, args[2].shape, device=CUDA, dtype=torch.int32)
    for lens, width in ((3, scenario.WINDOW), (10, args[9].shape[1])):
        args[lens] = torch.randint(-3, width + 3, (TOKENS,), device=CUDA, dtype=torch.int32)
    for cache, indices in ((1, 2), (8, 9)):
        args[cache][:2] = 0xFF  # codes and scales that are NaN
        args[indices][(args[indices] >= 0) & (args[indices] < 2 * scenario.BLOCK)] = -1
    args[3][:5] = args[10][:5] = 0
    return tuple(args)


def is_by_rows(args: tuple[Any, ...]) -> bool:
    quant = len(args) > len(DecodeArguments._fields)
    call = decode_call(DecodeQuantArguments(*args) if quant else DecodeArguments(*args))
    return why_unsupported_by_rows(call, gpu_of(CUDA)) == ""


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("fused", ["none", "prologue", "epilogue", "both"])
def test_results_are_those_of_the_reference(fused: str, heads: int) -> None:
    args = arguments(fused, heads)
    assert is_by_rows(args) is IS_HOPPER
    with poisoned_empty():
        got = sparse_mla_decode(*args)
    for x, y in zip(got, sparse_mla_decode(*args), strict=True):
        assert_bitwise(x, y)
    want = REFERENCES["sparse_mla_decode"](*args)
    assert_close(got[0], want[0], FEW_KEYS, turned=layout.ROPE_DIM if fused in scenario.TURNED else 0)
    assert_close(got[1], want[1], NORMED_LSE if fused in ("prologue", "both") else "lse")


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("fused", ["none", "both"])
def test_rows_of_bfloat16_are_read_where_they_are_or_copied(fused: str, copied: bool) -> None:
    fp8 = arguments(fused, 64)
    window, extra = (torch.randn(len(fp8[i]), fp8[j], 512, device=CUDA).bfloat16() for i, j in ((1, 4), (8, 11)))
    window[:2] = extra[:2] = float("nan")
    if copied:
        window = torch.stack([window, window], 1)[:, 0]
    args = (fp8[0], window, *fp8[2:5], "plain", *fp8[6:8], extra, *fp8[9:])
    assert is_by_rows(args) is IS_HOPPER
    with poisoned_empty():
        got = sparse_mla_decode(*args)
    want = REFERENCES["sparse_mla_decode"](*args)
    assert_close(got[0], want[0], FEW_KEYS, turned=layout.ROPE_DIM if fused == "both" else 0)
    assert_close(got[1], want[1], NORMED_LSE if fused == "both" else "lse")
    # Other requests' pages, far more than could be copied, change nothing.
    more = torch.full((40 * len(extra), *extra.shape[1:]), float("nan"), dtype=extra.dtype, device=CUDA)
    large = (*args[:8], torch.cat([extra, more]), *args[9:])
    if not copied:
        assert is_by_rows(large) is IS_HOPPER
        for x, y in zip(sparse_mla_decode(*large), got, strict=True):
            assert_bitwise(x, y)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("fused", ["epilogue", "both"])
def test_outputs_are_rotated_back_as_by_inv_rope(fused: str, heads: int) -> None:
    args = arguments(fused, heads)
    assert is_by_rows(args) is IS_HOPPER
    with poisoned_empty():
        got = sparse_mla_decode(*args)
    out, lse = sparse_mla_decode(*args[:16])
    assert_bitwise(got[0], REFERENCES["inv_rope"](out, *args[13:15]))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_quantised_outputs_are_those_of_inv_rope_fp8_quant(heads: int, packed: bool) -> None:
    args = (*arguments("quant", heads)[:20], packed)
    assert is_by_rows(args) is IS_HOPPER
    with poisoned_empty():
        got = sparse_mla_decode_quant(*args)
    out, _ = sparse_mla_decode(*args[:16])
    for x, y in zip(got, REFERENCES["inv_rope_fp8_quant"](out, *args[13:15], *args[18:]), strict=True):
        assert_bitwise(x, y)


def test_queries_that_start_anywhere_are_normed_by_a_launch_of_their_own() -> None:
    """TMA does not support them, and the separate norm rounds something else."""
    args = arguments("both", 64)
    apart = torch.full((*args[0].shape[:2], layout.HEAD_DIM + 1), torch.nan, dtype=args[0].dtype, device=CUDA)
    apart[..., 1:] = args[0]
    uneven = (apart[..., 1:], *args[1:])
    assert is_by_rows(uneven) is IS_HOPPER
    with poisoned_empty():
        got = sparse_mla_decode(*uneven)
    want = sparse_mla_decode(*args)
    assert_close(got[0], want[0], FEW_KEYS, turned=layout.ROPE_DIM)
    assert_close(got[1], want[1], NORMED_LSE)


def test_queries_of_any_magnitude_are_normed() -> None:
    """Squares that overflow count as zero, invalid slots too; values that are not finite stay with their head."""
    args = arguments("prologue", 64)
    args[0][:, ::3] *= 1e25
    args[0][:, 5] *= 1e-25
    with poisoned_empty():
        want = sparse_mla_decode(*args)
    reference = REFERENCES["sparse_mla_decode"](*args)
    assert_close(want[0], reference[0], FEW_KEYS)
    assert_close(want[1], reference[1], NORMED_LSE)
    args[0][7:9, 17, 5], args[0][:2, 17, 500] = torch.nan, torch.inf
    got = sparse_mla_decode(*args)
    for x, y in zip(got, want, strict=True):
        x[7:9, 17], x[:2, 17] = y[7:9, 17], y[:2, 17]
        assert_bitwise(x, y)
