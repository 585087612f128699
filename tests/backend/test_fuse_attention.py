"""When attention takes over the norm and RoPE of its queries, and the inverse RoPE behind. Results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Merged, merged

T, H, D, ROPE, BLOCK, EPS = 6, 2, 64, 16, 64, 1e-6
ATTENTION = "sparse_mla_decode"
ops: Any = torch.ops.dsv4


class Attention:
    """Attention of T tokens to themselves and to one more each, with vectors of `dim`."""

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
def compare(run: Callable[[Tensor], Tensor], attention: Attention, options: dict[str, Any] | None = None) -> Merged:
    """The result and the cache equal those of the graph that is not merged."""
    expected, got = attention.cache.clone(), attention.cache.clone()
    result = merged(run, options)
    assert_bitwise(result.call(got), run(expected))
    assert_bitwise(got, expected)
    return result


def test_the_half_of_q_goes_inside_and_the_cache_is_read_behind_the_half_of_kv() -> None:
    attention = Attention()
    result = compare(lambda cache: attention(attention.norm_and_insert(cache), cache), attention)
    assert result.ops == {"kv_rope_insert": 1, ATTENTION: 1}
    assert [(fusion.ops, fusion.fused) for fusion in result.fusions] == [(("q_norm_rope", ATTENTION), True)]


def test_a_norm_with_an_eps_of_zero_goes_inside() -> None:
    attention = Attention()
    assert compare(lambda cache: attention(attention.norm(0.0), cache), attention).ops == {ATTENTION: 1}


@pytest.mark.parametrize("eps", [EPS, 0.0])
@pytest.mark.parametrize("where", ["front", "back"])
def test_attention_that_normalises_and_rotates_already_takes_over_no_more(where: str, eps: float) -> None:
    attention = Attention()
    own = {"positions": attention.positions + 5, "cos_sin_cache": attention.table, "q_norm_eps": eps}

    def run(cache: Tensor) -> Tensor:
        if where == "front":
            return attention(attention.norm(), cache, **own)
        back: Tensor = ops.inv_rope(attention(attention.q, cache, **own), attention.positions, attention.table)
        return back

    result = compare(run, attention)
    assert result.ops == {ATTENTION: 1, "q_norm_rope" if where == "front" else "inv_rope": 1}
    assert result.reasons == [f"{ATTENTION} rotates already"]


@pytest.fixture
def kernel() -> Iterator[None]:
    """A kernel for attention on the CPU, as device kernels are registered; it refuses what that of GPUs refuses."""
    library = torch.library.Library("dsv4", "IMPL")
    library.impl(ATTENTION, REFERENCES[ATTENTION], "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(("dim", "merges"), [(D, True), (96, False)])
def test_a_demand_that_attention_alone_meets_is_met(kernel: None, dim: int, merges: bool) -> None:
    """The kernel rotates vectors of a power of two of dims only."""
    attention = Attention(dim)
    options = {"dsv4.fuse": "on", f"dsv4.impl.{ATTENTION}": "triton"}
    result = compare(lambda cache: attention(attention.norm(), cache), attention, options)
    assert (result.ops == {ATTENTION: 1}) is merges
    wanted = f"dsv4.impl.{ATTENTION}='triton' would not be met: the kernel rotates vectors of a power of two of dims"
    assert [reason.partition(",")[0] for reason in result.reasons] == ([] if merges else [wanted])

    torch.compiler.reset()
    compiled = torch.compile(
        lambda cache: attention(attention.norm(), cache), backend="dsv4", fullgraph=True, options=options
    )
    with torch.no_grad(), decisions.collect() as decided:
        compiled(attention.cache.clone())
    assert (ATTENTION, "triton") in [(decision.op, decision.impl) for decision in decided]
