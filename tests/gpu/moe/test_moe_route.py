"""`moe_route` on a GPU: choice and weights, repeats, capture, and the same bits for a token in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.moe.moe_route import moe_route
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import hostile_indices, strided

CUDA = torch.device("cuda")
MODELS = {"Flash": (256, 4096), "Pro": (384, 7168)}
TOKENS = (1, 2, 15, 16, 17, 128, 513, 1024, 1025, 8192)
DISTINCT = 2e-5
"""Smallest distance of two keys of a choice where float32 sums of any order choose alike."""


def problem(tokens: int, model: str = "Flash", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    (experts, size), generator = MODELS[model], torch.Generator(CUDA).manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, generator=generator)

    return randn(tokens, size).bfloat16(), (randn(experts, size) * 0.02).to(dtype), randn(experts) * 0.05


def check(*args: Any) -> None:
    """Choices are those of float64 where these are distinct, and weights are close."""
    ids, weights = moe_route(*args)
    x, gate, bias, _, table, top_k, scale = args
    if table is None:
        scores = torch.nn.functional.softplus(x.double() @ gate.double().t()).sqrt()
        order, want = (scores if bias is None else scores + bias).sort(dim=1, descending=True, stable=True)
        clear = (order[:, :top_k] - order[:, 1 : top_k + 1] > DISTINCT).all(1)
        assert clear.float().mean() > 0.9
        assert torch.equal(ids[clear].long(), want[clear, :top_k])
        chosen = scores.gather(1, ids.long())
        want_weights = chosen / chosen.sum(1, keepdim=True) * scale
    else:
        want_ids, want_weights = REFERENCES["moe_route"](*args)
        assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want_weights.double(), rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_routers_of_the_models(model: str, tokens: int, dtype: torch.dtype) -> None:
    x, gate, bias = problem(tokens, model, dtype)
    check(x, gate, bias, None, None, 6, 1.5)
    check(x, gate, None, None, None, 6, 2.5)


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_routing_by_hash(tokens: int) -> None:
    x, gate, _ = problem(tokens)
    table = torch.randint(-1, 257, (1000, 6), device=CUDA)
    check(x, gate, None, hostile_indices((tokens,), 1000, fraction=0.2, device=CUDA), table, 6, 1.5)
    check(strided(x), strided(gate), None, torch.arange(tokens, device=CUDA) % 1000, table.int(), 6, 1.5)


def test_nan_infinities_and_ties() -> None:
    x, gate, bias = problem(33)
    x[3], x[4, 7], bias[5], bias[9] = torch.nan, torch.inf, torch.nan, -torch.inf
    gate[128:] = gate[:128]
    bias[128:] = bias[:128]
    ids, _ = moe_route(x, gate, bias)
    assert all(len({*row}) == 6 and min(row) >= 0 and max(row) < 256 for row in ids.tolist())
    assert ids[3].tolist() == [*range(6)]
    ids, _ = moe_route(torch.zeros_like(x), gate)
    assert ids.tolist() == [[*range(6)]] * 33


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_is_routed_by_the_same_bits_in_every_batch(model: str, dtype: torch.dtype) -> None:
    x, gate, bias = problem(8192, model, dtype)
    want = moe_route(x, gate, bias, None, None, 6, 1.5)
    for tokens in (1, 7, 16, 128, 1000, 1025, 3000):
        for got, full in zip(moe_route(x[:tokens], gate, bias, None, None, 6, 1.5), want, strict=True):
            assert torch.equal(got, full[:tokens]), tokens


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_repeats_capture_and_streams(tokens: int) -> None:
    args = (*problem(tokens), None, None, 6, 1.5)
    want = moe_route(*args)
    for _ in range(100):
        assert all(map(torch.equal, moe_route(*args), want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [moe_route(*args) for _ in range(5)]
    for _ in range(3):
        args[0].copy_(args[0].flip(0))
        graph.replay()
        want = moe_route(*args)
        assert all(torch.equal(*pair) for one in captured for pair in zip(one, want, strict=True))
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(moe_route(*args))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for one in results for pair in zip(one, want, strict=True))
