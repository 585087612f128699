"""Fusion of attention with the norm and RoPE of q and with the inverse RoPE after it; results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused

T, H, D, ROPE, BLOCK, EPS = 6, 2, 64, 16, 64, 1e-6
ATTENTION = "sparse_mla_decode"
ops: Any = torch.ops.dsv4


class Attention:
    """Attention of T tokens, each to itself and to one more, with vectors of `dim`."""

    def __init__(self, dim: int = D) -> None:
        self.q, self.kv, self.cache = torch.randn(T, H, dim), torch.randn(T, dim), torch.randn(2, BLOCK, dim)
        self.slots, self.positions, self.table = torch.arange(T) + 3, torch.arange(T), torch.randn(32, ROPE)
        self.indices = torch.stack([torch.arange(T) + 3, torch.arange(T)], dim=1).int()
        self.lens = torch.full((T,), 2, dtype=torch.int32)

    def __call__(self, q: Tensor, cache: Tensor, **options: Any) -> Tensor:
        out, _ = ops.sparse_mla_decode(q, cache, self.indices, self.lens, BLOCK, "plain", 0.1, **options)
        return out

    def norm(self, eps: float = EPS) -> Tensor:
        rotated: Tensor = ops.q_norm_rope(self.q, self.positions, self.table, eps)
        return rotated

    def norm_and_insert(self, cache: Tensor) -> Tensor:
        rotated: Tensor = ops.q_norm_rope_kv_insert(
            self.q, self.kv, cache, self.slots, self.positions, self.table, EPS, BLOCK, "plain"
        )
        return rotated


@torch.no_grad()
def compare(run: Callable[[Tensor], Tensor], attention: Attention, options: dict[str, Any] | None = None) -> Fused:
    """Compare the result and the cache with those of the unfused graph."""
    expected, got = attention.cache.clone(), attention.cache.clone()
    result = fused(run, options)
    assert_bitwise(result.call(got), run(expected))
    assert_bitwise(got, expected)
    return result


def test_the_q_half_is_fused_and_the_cache_is_read_after_the_kv_half() -> None:
    attention = Attention()
    result = compare(lambda cache: attention(attention.norm_and_insert(cache), cache), attention)
    assert result.ops == {"kv_rope_insert": 1, ATTENTION: 1}
    assert [(fusion.ops, fusion.fused) for fusion in result.fusions] == [(("q_norm_rope", ATTENTION), True)]


@pytest.mark.parametrize("what", ["positions", "table"])
def test_a_rotation_after_with_other_positions_or_another_table_is_not_fused_with_one_before(what: str) -> None:
    attention, other = Attention(), Attention()
    positions = attention.positions + 7 if what == "positions" else attention.positions
    table = other.table if what == "table" else attention.table

    def run(cache: Tensor) -> Tensor:
        out: Tensor = ops.inv_rope(attention(attention.norm(), cache), positions, table)
        return out

    result = compare(run, attention)
    assert [fusion.fused for fusion in result.fusions] == [False, True]
    assert "different positions or RoPE tables" in result.fusions[0].reason


def test_heads_that_the_norm_pads_are_not_fused() -> None:
    attention = Attention()

    def run(cache: Tensor) -> Tensor:
        return attention(ops.q_norm_rope(attention.q, attention.positions, attention.table, EPS, H + 2), cache)

    result = compare(run, attention)
    assert [fusion.fused for fusion in result.fusions] == [False] and "pads 2 heads to 4" in result.fusions[0].reason


def test_a_norm_with_an_eps_of_zero_is_fused() -> None:
    attention = Attention()
    assert compare(lambda cache: attention(attention.norm(0.0), cache), attention).ops == {ATTENTION: 1}


@pytest.mark.parametrize("eps", [EPS, 0.0])
@pytest.mark.parametrize("where", ["before", "after"])
def test_attention_that_already_applies_norm_and_rope_is_not_fused_again(where: str, eps: float) -> None:
    attention = Attention()
    options = {"positions": attention.positions + 5, "cos_sin_cache": attention.table, "q_norm_eps": eps}

    def run(cache: Tensor) -> Tensor:
        if where == "before":
            return attention(attention.norm(), cache, **options)
        out: Tensor = ops.inv_rope(attention(attention.q, cache, **options), attention.positions, attention.table)
        return out

    result = compare(run, attention)
    assert result.ops == {ATTENTION: 1, "q_norm_rope" if where == "before" else "inv_rope": 1}
    assert result.reasons == [f"{ATTENTION} already applies RoPE"]


@pytest.fixture
def kernel() -> Iterator[None]:
    """Register the reference of attention as a CPU kernel, with the limits of the GPU kernel."""
    library = torch.library.Library("dsv4", "IMPL")
    library.impl(ATTENTION, REFERENCES[ATTENTION], "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(("dim", "fuses"), [(D, True), (96, False)])
def test_a_demand_that_only_unfused_attention_meets_is_met(kernel: None, dim: int, fuses: bool) -> None:
    """The kernel applies RoPE only to heads with a power of two of dims."""
    attention = Attention(dim)
    options = {"dsv4.fuse": "on", f"dsv4.impl.{ATTENTION}": "triton"}
    result = compare(lambda cache: attention(attention.norm(), cache), attention, options)
    assert (result.ops == {ATTENTION: 1}) is fuses
    wanted = f"dsv4.impl.{ATTENTION}='triton' would not be met: rotated heads have a power of two of dims"
    assert [reason.partition(",")[0] for reason in result.reasons] == ([] if fuses else [wanted])

    torch.compiler.reset()
    compiled = torch.compile(
        lambda cache: attention(attention.norm(), cache), backend="dsv4", fullgraph=True, options=options
    )
    with torch.no_grad(), decisions.collect() as decided:
        compiled(attention.cache.clone())
    assert (ATTENTION, "triton") in [(decision.op, decision.impl) for decision in decided]
