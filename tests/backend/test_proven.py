"""`auto` uses on a GPU only implementations that have passed their tests there; others run on request."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.options import Options
from dsv4_compile.selection import proven
from dsv4_compile.selection.decisions import Call, Decision

SM90 = "cuda sm_90"


def call(op: str, architecture: str = SM90, **arguments: Any) -> Call:
    return Call(op, arguments, torch.device("cuda"), "triton", architecture, "node", "model.py:3")


def inv_rope(architecture: str = SM90) -> Call:
    o, positions, table = torch.randn(3, 2, 64).bfloat16(), torch.arange(3), torch.randn(8, 16)
    return call("inv_rope", architecture, o=o, positions=positions, cos_sin_cache=table)


def decide(one: Call, **options: str) -> Decision:
    registry.load()
    return registry.decide(one, Options.parse(None, {f"dsv4.{k}": v for k, v in options.items()}, ops=OPS))


@pytest.fixture
def nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "_entries", frozenset)


def test_auto_skips_an_implementation_that_no_gpu_has_run(nothing_proven: None) -> None:
    decision = decide(inv_rope())
    assert decision.impl == "eager"
    assert "triton has not been tested on cuda sm_90 yet" in decision.reason


def test_a_request_gets_an_unproven_implementation(nothing_proven: None) -> None:
    decision = decide(inv_rope(), impl="triton")
    assert decision.impl == "triton"
    assert registry.target_of(decision, inv_rope()).namespace == "dsv4_triton"


def test_auto_takes_a_proven_implementation_only_on_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "_entries", lambda: frozenset({("triton", "inv_rope", SM90)}))
    assert decide(inv_rope()).impl == "triton"
    assert registry.target_of(decide(inv_rope()), inv_rope()).namespace == "dsv4_triton"
    assert decide(inv_rope("cuda sm_100")).impl == "eager"


def test_ir_yields_only_to_a_kernel_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """IR once yielded to a kernel that was not proven, which left only the reference."""
    x, weight = torch.empty(4, 256, dtype=torch.bfloat16), torch.empty(128, 256, dtype=torch.float8_e4m3fn)
    one = call("fp8_linear", x=x, weight=weight, weight_scale=torch.ones(1, 2), quantize_input=True, beside=None)
    tested = {("ir", "fp8_linear", SM90)}
    monkeypatch.setattr(proven, "_entries", lambda: frozenset(tested))
    assert decide(one).impl == "ir"
    tested.add(("triton", "fp8_linear", SM90))
    assert decide(one).impl == "triton"


def test_trust_ends_with_its_block(nothing_proven: None) -> None:
    with proven.trust():
        assert decide(inv_rope()).impl in ("ir", "triton")
    assert decide(inv_rope()).impl == "eager"


def test_the_record_names_ops_and_implementations_that_exist() -> None:
    rows = json.loads(proven.RECORD.read_text())["proven"]
    assert rows
    for row in rows:
        assert row["op"] in OPS
        assert row["impl"] in ("ir", "triton")
        assert set(row) == {"impl", "op", "architecture", "torch", "triton", "date"}
