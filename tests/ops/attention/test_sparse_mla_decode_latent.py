"""Attention with the leading dims of its keys as values, against float64 loops over single keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode_latent
from dsv4_compile.testing import assert_bitwise, assert_close, check_op, hostile_indices, padded, random_cache
from tests.ops.attention import sparse_mla_oracle as oracle


def case(
    tokens: int = 4, width: int = 9, dim: int = 40, value_dim: int = 24, dtype: torch.dtype = torch.float32
) -> Any:
    """Return arguments with a third of all slots invalid, lengths of every kind, and NaN in memory not selected."""
    pages = random_cache("plain", 3, 32, live=30, head_dim=dim, dtype=dtype)
    slots = pages.slots[torch.randint(30, (tokens, width))].int()
    slots = torch.where(torch.rand(tokens, width) < 0.3, hostile_indices((tokens, width), 96, fraction=1.0), slots)
    lens = torch.tensor([-3, 0, 1, width // 2, width, width + 1])[torch.randint(6, (tokens,))].int()
    return [torch.randn(tokens, 3, dim).to(dtype), pages.cache, slots, lens, 32, 0.2, value_dim]


def exact(q: Tensor, cache: Tensor, slots: Tensor, lens: Tensor, block: int, scale: float, value_dim: int) -> Any:
    keys = [oracle.selected(cache, "plain", block, slots[t], int(lens[t]), 1.0) for t in range(q.shape[0])]
    out, _, lse = oracle.attend(q, keys, scale, None)
    return out[..., :value_dim], lse


@pytest.mark.parametrize("value_dim", [1, 24, 40])
def test_result_is_the_exact_value(value_dim: int) -> None:
    args = case(value_dim=value_dim)
    for got, want in zip(sparse_mla_decode_latent(*args), exact(*args), strict=True):
        assert_close(got, want, "attention_float32")


def test_real_dims_in_bfloat16() -> None:
    args = case(3, 30, 576, 512, torch.bfloat16)
    out, lse = sparse_mla_decode_latent(*args)
    want_out, want_lse = exact(*args)
    assert out.dtype is torch.bfloat16
    assert_close(out, want_out)
    assert_close(lse, want_lse, "attention_float32")


def test_a_row_without_entries_gives_zero_and_infinity() -> None:
    args = case()
    args[3] = torch.zeros_like(args[3])
    out, lse = sparse_mla_decode_latent(*args)
    assert not out.any()
    assert (lse == math.inf).all()


def test_op_contract() -> None:
    args = case()
    spread = [padded(x) if isinstance(x, Tensor) and i != 1 else x for i, x in enumerate(args)]
    check_op(sparse_mla_decode_latent, [tuple(args), tuple(spread), tuple(case(0)), tuple(case(1))])


def test_compiled_gives_the_same_bits_for_any_number_of_tokens() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*args: Any) -> tuple[Tensor, Tensor]:
        return sparse_mla_decode_latent(*args)

    for tokens in (3, 5, 8):
        args = case(tokens)
        for index in (0, 2, 3):
            torch._dynamo.mark_dynamic(args[index], 0)
        for a, b in zip(compiled(*args), sparse_mla_decode_latent(*args), strict=True):
            assert_bitwise(a, b, strides=True)


@pytest.mark.parametrize(("position", "value"), [(6, 0), (6, 41), (4, 16), (3, torch.zeros(1, dtype=torch.int32))])
def test_wrong_arguments_raise(position: int, value: Any) -> None:
    args = case()
    args[position] = value
    with pytest.raises(InputError, match=r"E20[13]"):
        sparse_mla_decode_latent(*args)
