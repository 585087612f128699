"""Every dsv4 op of a compiled graph has one decision; a demand is met or an error, a preference may be declined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import backend
from dsv4_compile.lowering import registry
from dsv4_compile.selection import decisions

EPS = 1e-6


def attention_inputs(q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    q, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(q, kv, torch.ones_like(q[0]), torch.ones_like(kv[0]), EPS)
    slots, _ = torch.ops.dsv4.ragged_from_dense(slots[None].int(), positions[-1:] + 1)
    torch.ops.dsv4.kv_rope_insert(kv, cache, slots.long(), positions, table, 4, "plain")
    heads = torch.ops.dsv4.q_norm_rope(q.unflatten(-1, (2, -1)), positions, table, EPS)
    return torch.ops.dsv4.inv_rope(heads, positions, table)


def _inputs() -> list[Tensor]:
    return [
        torch.randn(3, 48),
        torch.randn(3, 24),
        torch.zeros(2, 4, 24),
        torch.tensor([0, -1, 5]),
        torch.arange(3),
        torch.randn(8, 8),
    ]


def _decide(options: dict[str, Any] | None = None) -> list[decisions.Decision]:
    torch.compiler.reset()
    with torch.no_grad(), decisions.collect() as decided:
        torch.compile(attention_inputs, backend=backend.dsv4, fullgraph=True, options=options)(*_inputs())
    return decided


def test_every_op_yields_exactly_one_decision_with_reason_and_place() -> None:
    decided = _decide()
    chosen = {d.op: d.impl for d in decided}
    assert chosen == {
        "fused_q_kv_rmsnorm": "ir",
        "ragged_from_dense": "eager",
        "kv_rope_insert": "eager",
        "q_norm_rope": "ir",
        "inv_rope": "ir",
    }
    assert len(decided) == len(chosen)
    assert all(d.reason and d.node for d in decided)
    assert {d.where.rpartition(":")[0] for d in decided} == {__file__}
    reasons = {d.op: d.reason for d in decided}
    assert reasons["ragged_from_dense"] == "no Inductor lowering; its kernel runs on GPUs"
    assert reasons["kv_rope_insert"] == "the C++ backend cannot predicate stores; its kernel runs on GPUs"


def test_a_preference_that_an_op_does_not_support_is_recorded_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry.forget_warnings()
    with caplog.at_level(logging.WARNING, logger="dsv4_compile"):
        decided = _decide({"dsv4.impl": "triton"})
    assert {(d.op, d.impl, d.reason) for d in decided} == {
        (op, "eager", "its kernel runs on GPUs")
        for op in ("fused_q_kv_rmsnorm", "ragged_from_dense", "kv_rope_insert", "q_norm_rope", "inv_rope")
    }
    assert len(caplog.records) == 5
    assert "dsv4.impl='triton' is not available for inv_rope: its kernel runs on GPUs" in caplog.messages


def test_eager_for_all_and_ir_for_one() -> None:
    decided = {d.op: d.impl for d in _decide({"dsv4.impl": "eager", "dsv4.impl.q_norm_rope": "ir"})}
    assert decided["q_norm_rope"] == "ir"
    assert set(decided.values()) == {"ir", "eager"}


def test_a_demand_that_cannot_be_met_is_e302_with_the_available_implementations() -> None:
    with pytest.raises(Exception, match=r"\[E302\]") as caught:
        _decide({"dsv4.impl.kv_rope_insert": "ir"})
    message = str(caught.value)
    assert "dsv4.impl.kv_rope_insert='ir' for the call at " in message
    assert "why   the C++ backend cannot predicate stores" in message
    assert "use one of eager, or auto" in message


def test_a_function_that_is_already_compiled_records_no_decision() -> None:
    compiled = torch.compile(attention_inputs, backend=backend.dsv4, fullgraph=True, options={"dsv4.impl": "eager"})
    with torch.no_grad():
        compiled(*_inputs())
        with decisions.collect() as decided:
            compiled(*_inputs())
    assert decided == []


def test_collectors_nest() -> None:
    decision = decisions.Decision("inv_rope", "eager", "a reason")
    with decisions.collect() as outer:
        with decisions.collect() as inner:
            decisions.record(decision)
        assert inner == [decision]
    decisions.record(decision)
    assert outer == [decision]
    assert str(decision) == "inv_rope: eager (a reason)"


@pytest.fixture
def kernels() -> Iterator[None]:
    """Register CPU kernels that return ones, as device kernels are registered: for an op with IR and one without."""
    library = torch.library.Library("dsv4", "IMPL")
    library.impl("inv_rope", lambda o, positions, table: torch.ones_like(o), "CPU")
    library.impl("prefill_gather_lens", lambda starts, lens, decodes, window: torch.ones_like(lens[decodes:]), "CPU")
    yield
    library._destroy()


def rotated_back() -> tuple[str, tuple[Any, ...]]:
    return "inv_rope", (torch.randn(3, 2, 32), torch.arange(3), torch.randn(8, 8))


def gather_lens() -> tuple[str, tuple[Any, ...]]:
    return "prefill_gather_lens", (torch.tensor([0, 1, 4]).int(), torch.tensor([9, 7]).int(), 1, 4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("call", "options", "impl"),
    [
        (gather_lens, None, "triton"),
        (gather_lens, {"dsv4.impl": "eager"}, "eager"),
        (gather_lens, {"dsv4.impl.prefill_gather_lens": "eager"}, "eager"),
        (rotated_back, None, "ir"),
        (rotated_back, {"dsv4.impl": "triton"}, "triton"),
        (rotated_back, {"dsv4.impl.inv_rope": "triton"}, "triton"),
        (rotated_back, {"dsv4.impl": "eager"}, "eager"),
    ],
)
def test_ir_is_preferred_to_a_device_kernel_and_that_to_the_reference_unless_one_is_requested(
    kernels: None, call: Callable[[], tuple[str, tuple[Any, ...]]], options: dict[str, str] | None, impl: str
) -> None:
    op, args = call()
    reference = registry.REFERENCES[op](*args)

    def run(*args: Any) -> Tensor:
        return getattr(torch.ops.dsv4, op)(*args)

    with decisions.collect() as decided:
        actual = torch.compile(run, backend=backend.dsv4, fullgraph=True, options=options)(*args)
    assert [(d.op, d.impl) for d in decided] == [(op, impl)]
    torch.testing.assert_close(actual, torch.ones_like(reference) if impl == "triton" else reference)
