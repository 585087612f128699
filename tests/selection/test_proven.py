"""`auto` uses on a GPU only implementations that have passed their tests there, as they are; others run on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import runs_kernel
from dsv4_compile.options import Options
from dsv4_compile.passes.choose import ChooseImplementations
from dsv4_compile.selection import checked, proven
from dsv4_compile.selection.decisions import Call, Decision

SM90 = "cuda sm_90"
STAMP = {"architecture": SM90, "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-23"}
Write = Callable[..., None]


def call(op: str, architecture: str = SM90, **arguments: Any) -> Call:
    return Call(op, arguments, torch.device("cuda"), "triton", architecture, "node", "model.py:3")


def inv_rope(architecture: str = SM90) -> Call:
    o, positions, table = torch.randn(3, 2, 64).bfloat16(), torch.arange(3), torch.randn(8, 16)
    return call("inv_rope", architecture, o=o, positions=positions, cos_sin_cache=table)


def decide(one: Call, **options: str) -> Decision:
    registry.load()
    return registry.decide(one, Options.parse(None, {f"dsv4.{k}": v for k, v in options.items()}, ops=OPS))


def row(impl: str = "triton", op: str = "inv_rope", **other: str) -> dict[str, str]:
    kernel = {"fingerprint": proven.fingerprint(op, SM90)} if impl == "triton" else {}
    return {"impl": impl, "op": op, **kernel, **STAMP, **other}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the rows of the record, of a machine with Triton 3.6.0 and an empty cache."""
    path = tmp_path / "proven.json"

    def write(*rows: dict[str, str]) -> None:
        path.write_text(json.dumps({"proven": rows}))
        proven.forget()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    triton_is(monkeypatch, "3.6.0")
    monkeypatch.setattr(proven, "RECORD", path)
    write()
    yield write
    monkeypatch.undo()
    proven.forget()


def triton_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for module in (proven, checked):
        monkeypatch.setattr(module, "triton_version", lambda: version)
    proven.forget()


def test_auto_skips_an_implementation_that_no_gpu_has_run(record: Write) -> None:
    decision = decide(inv_rope())
    assert decision.impl == "eager"
    assert "triton has not been tested on cuda sm_90 yet" in decision.reason


def test_a_request_gets_an_unproven_implementation(record: Write) -> None:
    decision = decide(inv_rope(), impl="triton")
    assert decision.impl == "triton"
    assert registry.target_of(decision, inv_rope()).namespace == "dsv4_triton"


def test_auto_takes_a_proven_implementation_only_on_its_architecture(record: Write) -> None:
    record(row())
    assert decide(inv_rope()).impl == "triton"
    assert registry.target_of(decide(inv_rope()), inv_rope()).namespace == "dsv4_triton"
    assert decide(inv_rope("cuda sm_100")).impl == "eager"


def test_auto_skips_a_kernel_that_has_changed_since_it_was_proven(
    record: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(row(fingerprint="0" * 16))
    decision = decide(inv_rope())
    assert decision.impl == "eager"
    assert "triton has changed since it was proven on NVIDIA H200 (cuda sm_90), 2026-11-23" in decision.reason
    assert "dsv4.impl=triton uses it all the same" in decision.reason
    assert decide(inv_rope(), impl="triton").impl == "triton"
    monkeypatch.setattr("dsv4_compile.ops.common.kernels.device_architecture", lambda device: SM90)
    assert not runs_kernel("inv_rope", torch.device("cuda"))
    record(row())
    assert runs_kernel("inv_rope", torch.device("cuda"))


def test_a_kernel_that_the_table_lacks_is_not_proven(record: Write) -> None:
    record(row() | {"op": "unknown", "fingerprint": "0" * 16})
    assert "changed since" in proven.why_unproven("triton", "unknown", SM90)


def test_with_another_triton_a_kernel_waits_for_its_self_check(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    record(row())
    triton_is(monkeypatch, "3.7.1+git1")
    decision = decide(inv_rope())
    assert decision.impl == "eager"
    assert "proven with Triton 3.6.0, not with 3.7.1, and not checked here yet" in decision.reason
    assert proven.to_check(SM90) == ["inv_rope"] and proven.to_check("cuda sm_100") == []

    proven.note_checked(SM90, {"inv_rope": ""})
    assert decide(inv_rope()).impl == "triton"
    assert proven.to_check(SM90) == []
    proven.forget()  # as in a new process
    assert decide(inv_rope()).impl == "triton"

    triton_is(monkeypatch, "3.8.0")
    assert decide(inv_rope()).impl == "eager" and proven.to_check(SM90) == ["inv_rope"]


def test_a_kernel_that_failed_its_self_check_is_not_used(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    record(row())
    triton_is(monkeypatch, "3.7.1")
    proven.note_checked(SM90, {"inv_rope": "AssertionError: 3 is not 4"})
    decision = decide(inv_rope())
    assert decision.impl == "eager"
    assert "failed its self-check here: AssertionError: 3 is not 4" in decision.reason
    assert proven.to_check(SM90) == []


def test_a_self_check_proves_no_kernel_that_was_not_proven_or_has_changed(
    record: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_is(monkeypatch, "3.7.1")
    record(row(fingerprint="0" * 16))
    assert proven.to_check(SM90) == []
    proven.note_checked(SM90, {"inv_rope": "", "advance": ""})
    assert "changed since" in decide(inv_rope()).reason
    assert "not been tested" in proven.why_unproven("triton", "advance", SM90)


def test_results_of_other_kernels_or_torch_do_not_count(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    record(row())
    triton_is(monkeypatch, "3.7.1")
    proven.note_checked(SM90, {"inv_rope": ""})
    with monkeypatch.context() as other:
        other.setattr(proven, "table_digest", lambda: "another")
        assert proven.to_check(SM90) == ["inv_rope"]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert proven.to_check(SM90) == ["inv_rope"]


def test_a_spoilt_file_of_results_holds_nothing(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    record(row())
    triton_is(monkeypatch, "3.7.1")
    proven.note_checked(SM90, {"inv_rope": ""})
    (path,) = checked.path_of(SM90, proven.table_digest()).parent.iterdir()
    for text in ("", "[1]", "{"):
        path.write_text(text)
        proven.forget()
        assert proven.to_check(SM90) == ["inv_rope"]


def test_results_of_self_checks_key_the_compile_cache(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_pass = ChooseImplementations(Options.parse(None, None, ops=OPS), (), [])
    graph_pass.architectures = (SM90,)
    before = graph_pass.uuid()
    assert graph_pass.uuid() == before
    proven.note_checked(SM90, {"inv_rope": ""})
    assert graph_pass.uuid() != before


def test_inductor_code_needs_no_fingerprint_and_no_self_check(record: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    record(row("ir", "q_norm_rope"))
    triton_is(monkeypatch, "3.7.1")
    assert proven.is_proven("ir", "q_norm_rope", SM90) and proven.to_check(SM90) == []


def test_ir_yields_only_to_a_kernel_that_is_proven(record: Write) -> None:
    """IR once yielded to a kernel that was not proven, which left only the reference."""
    x, weight = torch.empty(4, 256, dtype=torch.bfloat16), torch.empty(128, 256, dtype=torch.float8_e4m3fn)
    one = call("fp8_linear", x=x, weight=weight, weight_scale=torch.ones(1, 2), quantize_input=True, beside=None)
    record(row("ir", "fp8_linear"))
    assert decide(one).impl == "ir"
    record(row("ir", "fp8_linear"), row("triton", "fp8_linear"))
    assert decide(one).impl == "triton"


def test_trust_ends_with_its_block(record: Write) -> None:
    with proven.trust():
        assert decide(inv_rope()).impl in ("ir", "triton")
    assert decide(inv_rope()).impl == "eager"


def test_an_architecture_without_a_column_has_the_fingerprints_of_all() -> None:
    fingerprints = {
        proven.fingerprint("inv_rope", f"cuda {name}") for name in ("sm_90", "sm_100", "gfx942", "sm_89", "sm_103")
    }
    assert len(fingerprints) == 4  # sm_89 and sm_103 have the same, and each column its own
    assert proven.fingerprint("no_op", "cuda sm_90") == proven.fingerprint("no_op", "cuda sm_89") == ""


def test_the_record_names_ops_and_implementations_that_exist() -> None:
    rows = json.loads(proven.RECORD.read_text())["proven"]
    assert rows
    for entry in rows:
        assert entry["op"] in OPS
        kernel = {"fingerprint"} if entry["impl"] == "triton" else set()
        assert entry["impl"] in ("ir", "triton")
        assert set(entry) == {"impl", "op", "architecture", "device", "torch", "triton", "date"} | kernel
