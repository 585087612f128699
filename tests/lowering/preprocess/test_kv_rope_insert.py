"""Calls of `kv_rope_insert` with and without IR, and its insert in C++. Cases in Triton are those of both halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import backend
from dsv4_compile.layout import HEAD_DIM, ROPE_DIM
from dsv4_compile.lowering.preprocess import kv_rope_insert as lowering
from dsv4_compile.selection import decisions
from dsv4_compile.selection.decisions import Call


def lowering_call(op: str, *, codegen: str = "triton", architecture: str = "cuda sm_90", **changes: Any) -> Call:
    """Return a call of `op` with usual arguments and `changes`."""
    arguments: dict[str, Any] = {
        "q": torch.empty(3, 4, HEAD_DIM, dtype=torch.bfloat16),
        "kv": torch.empty(3, HEAD_DIM, dtype=torch.bfloat16),
        "cos_sin_cache": torch.empty(8, ROPE_DIM),
        "cache_format": "fp8_ds_mla",
        "padded_heads": 0,
        "q_scale": None,
        "kv_scale": None,
    }
    return Call(op, {**arguments, **changes}, torch.device("cpu"), codegen, architecture)


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "plain", "fp8"])
def test_every_cache_format_has_ir_in_triton(cache_format: str) -> None:
    assert lowering.can_lower(lowering_call("kv_rope_insert", cache_format=cache_format)).impl == "ir"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codegen": "cpp"}, "the C++ backend cannot predicate stores"),
        ({"architecture": "cuda sm_80"}, "from sm_89 on, this is cuda sm_80"),
        ({"cos_sin_cache": torch.empty(8, 32)}, "for a rope dim of 64"),
    ],
)
def test_a_call_without_ir_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    decision = lowering.can_lower(lowering_call("kv_rope_insert", **changes))
    assert (decision.op, decision.impl) == ("kv_rope_insert", "eager")
    assert reason in decision.reason


def test_a_bfloat16_cache_needs_no_fp8_hardware() -> None:
    assert (
        lowering.can_lower(lowering_call("kv_rope_insert", architecture="cuda sm_80", cache_format="plain")).impl
        == "ir"
    )


@torch.no_grad()
def test_an_insert_on_cpp_is_the_reference_and_leaves_skipped_rows_alone() -> None:
    kv, positions, table = torch.randn(4, 24), torch.arange(4), torch.randn(32, 8)
    slots = torch.tensor([2, -1, 10**6, 5])
    caches = [torch.full((2, 4, 24), 7.0) for _ in range(2)]

    def run(kv: Tensor, cache: Tensor) -> None:
        torch.ops.dsv4.kv_rope_insert(kv + 1, cache, slots, positions, table, 4, "plain")

    run(kv, caches[0])
    with decisions.collect() as decided:
        torch.compile(run, backend=backend.dsv4, fullgraph=True)(kv, caches[1])
    assert torch.equal(caches[0], caches[1])
    assert (caches[1].flatten(0, 1)[[0, 1, 3, 4, 6, 7]] == 7).all()
    assert [d.impl for d in decided] == ["eager"]
    assert "cannot predicate stores" in decided[0].reason
