"""`mhc_pre` against scalar arithmetic and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.hyper_connections.mhc_pre import mhc_pre
from dsv4_compile.reference.hyper_connections.mhc_pre import sinkhorn
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.kernels.hyper_connections.calls import arguments, wrong

EPS = 1e-6


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float, hc_eps: float, iterations: int
) -> tuple[list[float], list[float], list[list[float]]]:
    """Return y, post and comb of one token, from loops over Python's numbers."""
    count, dim = streams.shape
    x, flat = streams.tolist(), streams.flatten().tolist()
    rms = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + eps)
    mix = [rms * sum(f * v for f, v in zip(row, flat, strict=True)) for row in fn.tolist()]
    kinds = [0] * count + [1] * count + [2] * count**2
    logits = [m * scale.tolist()[kind] + b for m, b, kind in zip(mix, base.tolist(), kinds, strict=True)]
    pre = [sigmoid(v) + hc_eps for v in logits[:count]]
    post = [2 * sigmoid(v) for v in logits[count : 2 * count]]
    comb = [logits[(2 + j) * count :][:count] for j in range(count)]
    for j, row in enumerate(comb):
        total = sum(math.exp(v) for v in row)
        comb[j] = [math.exp(v) / total + hc_eps for v in row]
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(row[k] for row in comb) + hc_eps for k in range(count)]
            comb = [[v / sums[k] for k, v in enumerate(row)] for row in comb]
        else:
            comb = [[v / (sum(row) + hc_eps) for v in row] for row in comb]
    y = [sum(pre[j] * x[j][d] for j in range(count)) for d in range(dim)]
    norm = 1 / math.sqrt(sum(v * v for v in y) / dim + eps)
    return [v * norm * w for v, w in zip(y, weight.tolist(), strict=True)], post, comb


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_number_is_that_of_plain_arithmetic(count: int, iterations: int) -> None:
    torch.manual_seed(count)
    rows = (count + 2) * count
    streams, fn = torch.randn(3, count, 5), torch.randn(rows, count * 5) / 3
    args = fn, torch.randn(rows), torch.randn(3), torch.randn(5), EPS, 1e-3, iterations
    results = mhc_pre(streams, *args)
    for token in range(3):
        for got, want in zip(results, by_hand(streams[token], *args), strict=True):
            torch.testing.assert_close(got[token], torch.tensor(want), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_results_are_those_in_float64(tokens: int, dtype: torch.dtype) -> None:
    args = arguments("mhc_pre", tokens, 64, dtype)
    assert wrong("mhc_pre", args, mhc_pre(*args)) == ""


def test_columns_of_comb_have_the_sum_one_and_rows_nearly() -> None:
    comb = sinkhorn(torch.randn(50, 4, 4), 1e-6, 20)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, 4), rtol=0, atol=2e-2)
    assert (comb > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_hyper_connection_and_norm_of_transformers(dtype: torch.dtype) -> None:
    config = DeepseekV4Config(hidden_size=48, hc_mult=4, hc_sinkhorn_iters=7, hc_eps=1e-4, rms_norm_eps=1e-5)
    connection, norm = hf.DeepseekV4HyperConnection(config), hf.DeepseekV4RMSNorm(48, eps=1e-5)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in (*connection.parameters(), *norm.parameters()):
            parameter.normal_()
        streams = torch.randn(2, 3, 4, 48).to(dtype)
        post, comb, collapsed = connection(streams)
        got = mhc_pre(
            streams.flatten(0, 1), connection.fn, connection.base, connection.scale, norm.weight, 1e-5, 1e-4, 7
        )
    for actual, want in zip(got, (norm(collapsed), post, comb), strict=True):
        tolerance = 2.0**-7 if actual.dtype is torch.bfloat16 else 1e-5
        # Of some versions of transformers the collapsed stream is float32.
        torch.testing.assert_close(actual, want.flatten(0, 1).detach().to(actual.dtype), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.t().contiguous().t() if x.dim() == 2 else x])
def test_strides_do_not_matter(spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments("mhc_pre", 4, 64)
    spreaded = tuple(spread(x) if isinstance(x, Tensor) else x for x in args)
    for got, want in zip(mhc_pre(*spreaded), mhc_pre(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-5)
        assert got.is_contiguous()


def test_op_keeps_its_promises() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = [arguments("mhc_pre", tokens, 32, dtype) for tokens in (0, 1, 5)]
        check_op(OPS["mhc_pre"], calls, utilities=dtype is torch.bfloat16)


def test_a_token_of_nan_keeps_to_itself() -> None:
    args = arguments("mhc_pre", 4, 32)
    want = mhc_pre(*args)
    args[0][2, 1, 3] = torch.nan
    others = torch.tensor([0, 1, 3])
    for got, clean in zip(mhc_pre(*args), want, strict=True):
        assert_bitwise(got[others], clean[others])
        assert got[2].isnan().all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(2, 4, 31), "fn covers all streams"),
        (1, torch.ones(23, 128), "fn has a row for each coefficient"),
        (2, torch.ones(23), "base has an element"),
        (3, torch.ones(2), "scale has an element"),
        (4, torch.ones(31), "norm_weight covers"),
        (7, 0, "iterations=0"),
    ],
)
def test_wrong_arguments_raise(place: int, value: Any, message: str) -> None:
    args = list(arguments("mhc_pre", 2, 32, torch.float32))
    args[place] = value
    with pytest.raises(InputError, match=message):
        mhc_pre(*args)
