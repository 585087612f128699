"""`moe_route_images` against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host import pdl
from dsv4_compile.kernels.moe import moe_route as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, begins_early
from tests.kernels.moe.programs import random_order
from tests.kernels.moe.test_moe_route import BF16, F32, TARGETS, WRITTEN, problem
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OP = "moe_route_images"


def images(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """A bias of image tokens that changes many choices, and every third token as one of these."""
    return torch.randn(experts) * 0.5, torch.arange(tokens) % 3 == 1


def check(*args: Any, seed: int = 0) -> Tensor:
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(kernels, "arrival_counters", lambda count, device: counters),
        poisoned_empty(),
        checked(mutated=WRITTEN) as seen,
        random_order(seed),
    ):
        ids, weights = kernels.moe_route_images(*args)
    tokens = len(args[0])
    assert seen == ["moe_route_kernel"] * (tokens > 0) + ["moe_choose_kernel"] * (tokens > 1)
    assert not counters.any()
    want_ids, want_weights = REFERENCES[OP](*args)
    assert_bitwise(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-5, atol=1e-7, equal_nan=True)
    return ids


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("tokens", "experts", "size", "top_k", "temperature"),
    [(1, 64, 320, 6, 0.5), (5, 48, 1024, 8, 1.0), (18, 20, 100, 3, 0.37), (33, 384, 128, 6, 2.0)],
)
def test_choice_and_weights_are_the_references(
    tokens: int, experts: int, size: int, top_k: int, temperature: float, dtype: torch.dtype
) -> None:
    x, gate, bias = problem(tokens, experts, size, dtype)
    ids = check(x, gate, bias, *images(tokens, experts), top_k, 1.5, temperature, seed=tokens)
    if tokens > 1:
        as_text, _ = REFERENCES["moe_route"](x, gate / temperature, bias, None, None, top_k)
        assert not torch.equal(ids, as_text), "the bias of image tokens changes no choice"


@interpreted
@pytest.mark.parametrize("is_image", [False, True])
def test_a_single_token_is_chosen_for_with_its_bias(is_image: bool) -> None:
    x, gate, bias = problem(1, 40, 128)
    image_bias = torch.zeros(40).index_fill_(0, torch.tensor([31]), 9.0)
    ids = check(x, gate, bias, image_bias, torch.tensor([is_image]), 4)
    assert (ids[0, 0] == 31) == is_image


@interpreted
def test_a_bias_of_the_other_tokens_is_not_looked_at() -> None:
    x, gate, bias = problem(9, 40, 128)
    image_bias, is_image = images(9, 40)
    check(x, gate, bias, torch.full_like(image_bias, torch.nan), torch.zeros_like(is_image), 6)
    check(x, gate, torch.full_like(bias, torch.nan), image_bias, torch.ones_like(is_image), 6)


@interpreted
def test_of_equal_scores_the_smaller_id_comes_first_and_nan_is_the_largest() -> None:
    x, gate, bias = problem(9, 40, 128)
    image_bias, is_image = images(9, 40)
    for pairs in (gate, bias, image_bias):
        pairs[1::2] = pairs[::2]
    check(x, gate, bias, image_bias, is_image, 6)
    bias[7], image_bias[11], image_bias[3] = torch.nan, torch.nan, -torch.inf
    check(x, gate, bias, image_bias, is_image, 40)


@interpreted
def test_arguments_are_read_where_they_are_and_no_token_gives_an_empty_result() -> None:
    x, gate, bias = problem(6, 30, 192)
    image_bias, is_image = images(6, 30)
    check(padded(x), strided(gate), strided(bias), strided(image_bias), strided(is_image), 5)
    check(strided(x), padded(gate.float()), bias, image_bias, is_image[1:].repeat(2)[1:7], 5, 2.5, 0.5)
    check(x[:0], gate, bias, image_bias, is_image[:0], 5)


@interpreted
def test_a_temperature_of_1_and_no_image_are_moe_route() -> None:
    x, gate, bias = problem(20, 40, 256)
    for tokens in (1, 20):
        got = kernels.moe_route_images(x[:tokens], gate, bias, -bias, torch.zeros(tokens, dtype=torch.bool), 6, 1.5)
        for one, want in zip(got, kernels.moe_route(x[:tokens], gate, bias, None, None, 6, 1.5), strict=True):
            assert_bitwise(one, want)


def test_unsupported_calls_say_why() -> None:
    x, gate, bias = problem(2, 8, 16)
    args = gate, bias, *images(2, 8)
    why = kernels.why_unsupported_moe_route_images
    assert why(x, *args) == ""
    assert "x is torch.float32" in why(x.float(), *args)
    assert "not 33 of 8" in why(x, *args, 33)


@pytest.mark.parametrize("tokens", [1, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_ahead_of_time_within_shared_memory(
    target: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdl, "gpu_of", lambda device: GPUS[target][0])
    gate = torch.empty(384, 5120, dtype=F32 if tokens != 1 else BF16)
    x, flags = torch.empty(tokens, 5120, dtype=BF16), torch.empty(tokens, dtype=torch.bool)
    with compiled_for(target) as compiled:
        kernels.moe_route_images(x, gate, *torch.empty(2, 384), flags, 6, 1.5, 0.5)
    assert len(compiled) == (1 if tokens == 1 else 2)
    for kernel in compiled:
        assert kernel.assembled and kernel.metadata.shared <= GPUS[target][1] * 1024
        if target.startswith("sm_"):
            assert begins_early(kernel)
            # Other instructions would round otherwise.
            assert "wgmma" not in kernel.asm["ptx"] and "tcgen05" not in kernel.asm["ptx"]
