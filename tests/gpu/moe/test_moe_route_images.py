"""`moe_route_images` on a GPU: choice and weights by the reference, repeats, capture, and the bits of `moe_route`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.moe.moe_route import moe_route, moe_route_images
from dsv4_compile.testing import strided

CUDA = torch.device("cuda")
EXPERTS, SIZE, TOP_K = 384, 5120, 6
DISTINCT = 2e-5
"""Smallest distance of two keys of a choice where float32 sums of any order choose alike."""


def problem(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator(CUDA).manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, generator=generator)

    biases = randn(2, EXPERTS) * 0.05
    is_image = torch.arange(tokens, device=CUDA) % 3 == 1
    return randn(tokens, SIZE).bfloat16(), (randn(EXPERTS, SIZE) * 0.02).to(dtype), *biases, is_image


def check(*args: Any) -> None:
    """Choices are those of float64 where these are distinct, and weights are close."""
    ids, weights = moe_route_images(*args)
    x, gate, bias, image_bias, is_image, top_k, scale, temperature = args
    scores = torch.nn.functional.softplus(x.double() @ gate.double().t() / temperature).sqrt()
    order, want = (scores + torch.where(is_image[:, None], image_bias, bias)).sort(dim=1, descending=True, stable=True)
    clear = (order[:, :top_k] - order[:, 1 : top_k + 1] > DISTINCT).all(1)
    assert clear.float().mean() > 0.9
    assert torch.equal(ids[clear].long(), want[clear, :top_k])
    chosen = scores.gather(1, ids.long())
    want_weights = chosen / chosen.sum(1, keepdim=True) * scale
    torch.testing.assert_close(weights.double(), want_weights, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 128, 1024, 1025, 4096])
def test_routers_of_the_model(tokens: int, dtype: torch.dtype) -> None:
    args = problem(tokens, dtype)
    check(*args, TOP_K, 1.5, 1.0)
    check(*args, TOP_K, 2.5, 0.5)
    check(*map(strided, args), TOP_K, 1.5, 0.7)


@pytest.mark.parametrize("tokens", [1, 100])
def test_one_image_token_alone_has_its_bias(tokens: int) -> None:
    x, gate, bias, image_bias, is_image = problem(tokens)
    is_image = is_image.fill_(False)
    is_image[0] = True
    image_bias[77] = 50.0
    ids, _ = moe_route_images(x, gate, bias, image_bias, is_image)
    assert (ids[0, 0] == 77 and not (ids[1:, 0] == 77).all()) or tokens == 1


@pytest.mark.parametrize("tokens", [1, 33, 2000])
def test_no_image_and_a_temperature_of_1_are_moe_route(tokens: int) -> None:
    x, gate, bias, image_bias, is_image = problem(tokens)
    got = moe_route_images(x, gate, bias, image_bias, torch.zeros_like(is_image), TOP_K, 1.5)
    assert all(map(torch.equal, got, moe_route(x, gate, bias, None, None, TOP_K, 1.5)))


def test_nan_and_ties() -> None:
    x, gate, bias, image_bias, is_image = problem(33)
    x[3], x[4, 7], bias[5], image_bias[9] = torch.nan, torch.inf, torch.nan, torch.nan
    gate[192:], bias[192:], image_bias[192:] = gate[:192], bias[:192], image_bias[:192]
    ids, _ = moe_route_images(x, gate, bias, image_bias, is_image)
    assert all(len({*row}) == TOP_K and min(row) >= 0 and max(row) < EXPERTS for row in ids.tolist())
    assert ids[3].tolist() == [*range(TOP_K)]
    ids, _ = moe_route_images(torch.zeros_like(x), gate, 0 * bias.nan_to_num(), 0 * bias.nan_to_num(), is_image)
    assert ids.tolist() == [[*range(TOP_K)]] * 33


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_repeats_and_capture(tokens: int) -> None:
    args = (*problem(tokens), TOP_K, 1.5, 0.5)
    want = moe_route_images(*args)
    for _ in range(50):
        assert all(map(torch.equal, moe_route_images(*args), want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [moe_route_images(*args) for _ in range(5)]
    for _ in range(3):
        args[0].copy_(args[0].flip(0))
        args[4].copy_(args[4].flip(0))
        graph.replay()
        want = moe_route_images(*args)
        assert all(torch.equal(*pair) for one in captured for pair in zip(one, want, strict=True))
