"""The lowerings on the CPU's C++ backend, and which calls they decline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import backend
from dsv4_compile.layout import HEAD_DIM, ROPE_DIM, allocate_cache
from dsv4_compile.lowering.preprocess import q_norm_rope as lowering
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise, strided
from tests.lowering.preprocess.test_kv_rope_insert import lowering_call

EPS = 1e-6


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "plain", "fp8"])
def test_every_cache_format_has_ir_on_triton(cache_format: str) -> None:
    call = lowering_call("q_norm_rope_kv_insert", cache_format=cache_format)
    assert lowering.can_lower_both(call).impl == "ir"


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("q_norm_rope_kv_insert", {"codegen": "cpp", "q": torch.empty(3, 4, 511)}, "the head dim is odd"),
        ("q_norm_rope_kv_insert", {"cos_sin_cache": torch.empty(8, 32)}, "for a rope dim of 64"),
        ("q_norm_rope", {"codegen": "halide"}, "lowered for C++ and Triton, not for halide"),
        ("q_norm_rope", {"architecture": "cuda sm_86", "q_scale": torch.ones(1)}, "this is cuda sm_86"),
        ("q_norm_rope", {"q": torch.empty(3, 4, 63), "cos_sin_cache": torch.empty(8, 6)}, "the head dim is odd"),
    ],
)
def test_a_declined_call_says_why(op: str, changes: dict[str, Any], reason: str) -> None:
    can_lower = {
        "q_norm_rope": lowering.can_lower_q,
        "q_norm_rope_kv_insert": lowering.can_lower_both,
    }
    decision = can_lower[op](lowering_call(op, **changes))
    assert (decision.op, decision.impl) == (op, "eager")
    assert reason in decision.reason


def _queries(tokens: int, heads: int, dim: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.randint(-3, 40, (tokens,), dtype=torch.int32)
    return torch.randn(tokens, heads, dim).to(dtype), positions, torch.randn(32, rope)


@torch.no_grad()
def test_cpp_queries_equal_the_reference_for_every_number_of_tokens_and_strides() -> None:
    def run(q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return torch.ops.dsv4.q_norm_rope(q * 2, positions, table, EPS, 4) * 0.5

    compiled = torch.compile(run, backend=backend.dsv4, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 2):
        q, positions, table = _queries(tokens, 3, HEAD_DIM, ROPE_DIM, torch.bfloat16)
        # Both round once, after the rotation; the sum of squares has a different order, hence one bfloat16 step.
        expected = run(q, positions, table)
        actual = compiled(strided(q), positions, table)
        assert actual.shape == (tokens, 4, HEAD_DIM)
        assert (actual[:, 3:] == 0).all()
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


@torch.no_grad()
def test_cpp_lowers_small_float32_heads_and_records_it() -> None:
    q, positions, table = _queries(7, 2, 24, 8, torch.float32)
    with decisions.collect() as decided:
        actual = torch.compile(torch.ops.dsv4.q_norm_rope, backend=backend.dsv4)(q, positions, table, EPS)
    torch.testing.assert_close(actual, torch.ops.dsv4.q_norm_rope(q, positions, table, EPS), rtol=1e-6, atol=1e-6)
    assert [(d.op, d.impl) for d in decided] == [("q_norm_rope", "ir")]


@torch.no_grad()
@pytest.mark.parametrize(("dim", "rope", "dtype"), [(24, 8, torch.float32), (HEAD_DIM, ROPE_DIM, torch.bfloat16)])
def test_cpp_rounds_queries_to_e4m3_as_the_reference_does(dim: int, rope: int, dtype: torch.dtype) -> None:
    q, positions, table = _queries(9, 2, dim, rope, dtype)
    q[0], q[1, 0], q[2] = 0, 1e4, q[2] * 1e-4
    args = (q, positions, table, EPS, 3, torch.tensor([0.005]))
    actual, expected = (
        torch.compile(torch.ops.dsv4.q_norm_rope, backend=backend.dsv4)(*args),
        torch.ops.dsv4.q_norm_rope(*args),
    )
    # The sum of squares has a different order: a value at a rounding boundary may move to its neighbour.
    steps = (actual.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and steps.sum() <= 4


@torch.no_grad()
def test_no_tokens_give_an_empty_result() -> None:
    q, positions, table = _queries(0, 2, 24, 8, torch.float32)
    actual = torch.compile(torch.ops.dsv4.q_norm_rope, backend=backend.dsv4)(q, positions, table, EPS, 4)
    assert actual.shape == (0, 4, 24)


@torch.no_grad()
@pytest.mark.parametrize("cache_format", ["plain", "fp8_ds_mla"])
def test_both_in_one_on_cpp_is_ir_for_q_around_the_reference_insert(cache_format: str) -> None:
    dim, rope, dtype = (24, 8, torch.float32) if cache_format == "plain" else (HEAD_DIM, ROPE_DIM, torch.bfloat16)

    def run(
        q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor
    ) -> tuple[Tensor, ...]:
        before = cache.float().sum()
        out = torch.ops.dsv4.q_norm_rope_kv_insert(
            q * 2, kv + 1, cache, slots, positions, table, EPS, 4, cache_format, 4
        )
        return out * 0.5, before, cache.float().sum()

    compiled = torch.compile(run, backend=backend.dsv4, fullgraph=True)
    with decisions.collect() as decided:
        for tokens in (5, 9, 2):
            q, positions, table = _queries(tokens, 3, dim, rope, dtype)
            kv, slots = torch.randn(tokens, dim).to(dtype), torch.randperm(16)[:tokens]
            slots[1::3], slots[2::3] = -1, 10**6
            caches = [allocate_cache(cache_format, 4, 4, dim, dtype=dtype) for _ in range(2)]
            expected = run(q, kv, caches[0], slots, positions, table)
            q, kv = strided(q), strided(kv)
            for tensor in (q, kv, slots, positions):
                torch._dynamo.mark_dynamic(tensor, 0)
            actual = compiled(q, kv, caches[1], slots, positions, table)
            torch.testing.assert_close(
                actual[0], expected[0], rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-6
            )
            # Readers around the op see the cache before and after it, and every byte is the reference's.
            assert_bitwise(caches[1], caches[0])
            assert [float(x) for x in actual[1:]] == pytest.approx([float(x) for x in expected[1:]])
            assert actual[1] == 0 and actual[2] != 0
    assert [(d.op, d.impl) for d in decided] == [("q_norm_rope_kv_insert", "ir")]
    assert decided[0].reason == "Inductor IR for q; the reference inserts kv: the C++ backend cannot predicate stores"
