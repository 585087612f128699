"""Sums of the C++ kernels for CPUs: every size of a block, and the same rounding in every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.cpu.linear.mm import FEW_TOKENS as FEW_ROWS
from dsv4_compile.cpu.moe.moe_experts import FEW_TOKENS
from dsv4_compile.ops.common.define import EAGER, REFERENCES
from dsv4_compile.testing import assert_bitwise
from tests.gemm_orders import by_size

pytestmark = pytest.mark.usefixtures("native_kernels")


def attention(tokens: int, heads: int, dim: int, width: int = 30) -> list[Any]:
    keys = torch.randn(12, 8, dim)
    slots = torch.randint(-1, 96, (tokens, width), dtype=torch.int32)
    lens = torch.randint(0, width + 1, (tokens,), dtype=torch.int32)
    return [torch.randn(tokens, heads, dim), keys, slots, lens, 8, "plain", dim**-0.5, torch.randn(heads)]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("dim", [8, 20, 64, 70])
def test_attention_of_every_block_agrees_with_the_reference(heads: int, dim: int) -> None:
    args = attention(6, heads, dim)
    args[3][2] = 0
    for got, want in zip(EAGER["sparse_mla_decode"](*args), REFERENCES["sparse_mla_decode"](*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_attention_of_a_token_has_its_bits_whoever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args = attention(9, 13, 70)
    batch = EAGER["sparse_mla_decode"](*args)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for t in range(9):
            alone = [value[t : t + 1] if i in (0, 2, 3) else value for i, value in enumerate(args)]
            for got, want in zip(EAGER["sparse_mla_decode"](*alone), batch, strict=True):
                assert_bitwise(got, want[t : t + 1])


def test_a_key_that_is_not_finite_reaches_the_tokens_that_attend_it_alone() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        args = attention(7, 5, 64)
        args[1].view(-1, 64)[17] = bad
        for got, want in zip(EAGER["sparse_mla_decode"](*args), REFERENCES["sparse_mla_decode"](*args), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
def test_weights_of_any_size_have_the_exponential_of_torch(scale: float) -> None:
    args = attention(5, 4, 64)
    args[0] *= 8.0
    args[6] = scale
    for got, want in zip(EAGER["sparse_mla_decode"](*args), REFERENCES["sparse_mla_decode"](*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tokens", [0, 1, 3, 6, 40, FEW_TOKENS + 1, 200])
def test_ops_of_hyper_connections_and_experts_agree_in_every_block(tokens: int) -> None:
    streams, fn, base = torch.randn(tokens, 3, 70), torch.randn(15, 210), torch.randn(15)
    mix = streams, fn, base, torch.rand(3), torch.rand(70), 1e-6, 1e-6
    head = streams, fn[:3].contiguous(), base[:3].contiguous(), torch.rand(1), torch.rand(70), 1e-6, 1e-6
    ids = torch.randint(-1, 5, (tokens, 2), dtype=torch.int32)
    weights: list[Tensor | None] = [torch.randn(5, 2 * 22, 70), torch.randn(5, 70, 22), None, None]
    experts = torch.randn(tokens, 70), ids, torch.rand(tokens, 2), *weights, torch.randn(2 * 9, 70), torch.randn(70, 9)
    calls: list[tuple[str, tuple[Any, ...]]] = [("mhc_pre", mix), ("mhc_head", head), ("moe_experts", experts)]
    for op, args in [*calls, ("grouped_linear", (torch.randn(tokens, 3 * 21), torch.randn(3 * 5, 21), 3))]:
        got, want = EAGER[op](*args), REFERENCES[op](*args)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def experts(tokens: int, count: int = 5) -> list[Any]:
    ids, weights = torch.randint(-1, count, (tokens, 2), dtype=torch.int32), torch.rand(tokens, 2)
    routed = torch.randn(count, 2 * 140, 300), torch.randn(count, 300, 140), None, None
    return [torch.randn(tokens, 300), ids, weights, *routed, torch.randn(2 * 150, 300), torch.randn(300, 150)]


def mix(tokens: int, rows: int, kinds: int) -> list[Any]:
    return [torch.randn(tokens, 3, 300), torch.randn(rows, 900), torch.randn(rows), torch.rand(kinds), torch.rand(300)]


def boundary(tokens: int) -> list[Any]:
    streams, *weights = mix(tokens, 15, 3)
    return [streams, torch.randn(tokens, 300), torch.rand(tokens, 3), torch.rand(tokens, 3, 3), *weights, 1e-6, 1e-6]


BY_TOKEN: dict[str, tuple[Callable[[int], list[Any]], int]] = {
    "moe_experts": (experts, 3),
    "moe_route": (lambda tokens: [torch.randn(tokens, 300), torch.randn(9, 300), torch.randn(9), None, None, 2], 1),
    "mhc_pre": (lambda tokens: [*mix(tokens, 15, 3), 1e-6, 1e-6], 1),
    "mhc_head": (lambda tokens: [*mix(tokens, 3, 1), 1e-6, 1e-6], 1),
    "mhc_boundary": (boundary, 4),
    "grouped_linear": (lambda tokens: [torch.randn(tokens, 3 * 300), torch.randn(3 * 5, 300), 3], 1),
}
"""Arguments of each op for a number of tokens, and how many of the first are by token."""


@pytest.mark.parametrize("tokens", [2, 7, FEW_ROWS])
@pytest.mark.parametrize("op", BY_TOKEN)
def test_a_token_has_its_bits_alone_and_in_a_batch(op: str, tokens: int) -> None:
    arguments, by_token = BY_TOKEN[op]
    args = arguments(tokens)

    def run(rows: slice) -> list[Tensor]:
        result = EAGER[op](*(value[rows] if i < by_token else value for i, value in enumerate(args)))
        return list(result) if isinstance(result, tuple) else [result]

    with by_size():
        batch = run(slice(None))
        for rows in (slice(0, 1), slice(tokens - 1, tokens), slice(1, 3), slice(0, tokens - 1)):
            for got, want in zip(run(rows), batch, strict=True):
                assert_bitwise(got, want[rows])
