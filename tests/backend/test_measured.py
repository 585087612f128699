"""`auto` chooses between IR and a kernel by the times at the nearest size on that GPU, or takes IR without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile import backend, passes
from dsv4_compile._compat import maybe_mark_dynamic
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.options import Options
from dsv4_compile.selection import decisions, measured, proven
from dsv4_compile.selection.decisions import Call, Decision

SM90 = "cuda sm_90"
TABLE = [
    {"op": "q_norm_rope", "architecture": SM90, "elements": 2 * 64, "ir_us": 5.0, "triton_us": 2.5},
    {"op": "q_norm_rope", "architecture": SM90, "elements": 200 * 64, "ir_us": 9.0, "triton_us": 9.5},
]


@pytest.fixture(autouse=True)
def everything_proven() -> Iterator[None]:
    with proven.trust():
        yield


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_entries", lambda: tuple(TABLE))


def decide(tokens: int, architecture: str = SM90, **options: str) -> Decision:
    registry.load()
    arguments: dict[str, Any] = {"q": torch.empty(tokens, 1, 64), "positions": torch.arange(tokens), "eps": 1e-6}
    arguments |= {"cos_sin_cache": torch.empty(8, 16), "padded_heads": 0, "q_scale": None}
    call = Call("q_norm_rope", arguments, torch.device("cuda"), "triton", architecture)
    return registry.decide(call, Options.parse(None, {f"dsv4.{k}": v for k, v in options.items()}, ops=OPS))


def test_the_faster_one_at_the_nearest_size_is_chosen_and_the_reason_shows_the_times(table: None) -> None:
    assert [decide(tokens).impl for tokens in (1, 19, 21, 10_000)] == ["triton", "triton", "ir", "ir"]
    assert decide(2).reason == "kernel for cuda sm_90; measured at such a size: ir 5.0 us, triton 2.5 us"


def test_no_tokens_count_as_the_smallest_size(table: None) -> None:
    assert decide(0).impl == "triton"


def test_an_equal_number_of_heads_is_preferred_to_an_equal_number_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    other_heads = {**TABLE[0], "elements": 640, "tokens": 1, "ir_us": 1.0}
    as_many = {**TABLE[0], "elements": 64 * 64, "tokens": 64}
    monkeypatch.setattr(measured, "_entries", lambda: (other_heads, as_many))
    assert measured.nearest("q_norm_rope", SM90, 640, 10) == {"ir": 5.0, "triton": 2.5}
    assert measured.nearest("q_norm_rope", SM90, 640) == {"ir": 1.0, "triton": 2.5}


def test_times_of_another_gpu_are_ignored(table: None) -> None:
    decision = decide(2, "cuda sm_100")
    assert decision.impl == "ir"
    assert "measured" not in decision.reason


def test_a_request_overrides_a_measurement(table: None) -> None:
    assert decide(2, impl="ir").impl == "ir"
    assert decide(10_000, **{"impl.q_norm_rope": "triton"}).impl == "triton"


def test_an_implementation_that_is_not_proven_is_not_compared(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_proven", lambda impl, op, architecture: impl == "ir")
    assert decide(2).impl == "ir"


def test_a_dynamic_dim_counts_with_its_size_during_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def spy(call: Call, options: Options) -> Decision:
        assert not isinstance(call.arguments["q"].shape[0], int)
        seen.append(call.arguments["q"].shape[0].node.hint * 64)
        return call.choose("eager", "a test")

    def run(q: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.ops.dsv4.q_norm_rope(q, positions, table, 1e-6)

    monkeypatch.setattr(registry, "decide", spy)
    for tokens in (3, 500):
        torch.compiler.reset()
        args = torch.randn(tokens, 1, 64), torch.arange(tokens), torch.randn(8, 16)
        for tensor in args[:2]:
            maybe_mark_dynamic(tensor, 0)
        # Collecting bypasses torch's caches, which keep the choice made at the first compilation.
        with decisions.collect(), torch.no_grad():
            torch.compile(run, backend=backend.dsv4, fullgraph=True)(*args)
    assert seen == [3 * 64, 500 * 64]


def test_a_bench_record_becomes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "measured.json"
    path.write_text(
        json.dumps({"measured": [TABLE[0], {**TABLE[0], "op": "inv_rope"}, {**TABLE[0], "architecture": "x"}]})
    )
    monkeypatch.setattr(measured, "RECORD", path)
    measured._entries.cache_clear()
    row = {"op": "q_norm_rope", "elements": 640, "impl": "ir", "us": 4.0}
    rows = [row, {**row, "impl": "triton", "us": 3.0}, {**row, "impl": "eager", "us": 99.0}]
    rows += [{**row, "elements": 1280, "tokens": 20}, {**row, "elements": 1280, "impl": "triton", "us": None}]
    rows += [{**row, "elements": 1280, "tokens": 10, "us": 7.0}]  # the same size with longer rows
    stamp = {"architecture": SM90, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02T03:04:05+00:00"}
    assert measured.update({"rows": rows, **stamp}) == 1
    assert measured.nearest("q_norm_rope", SM90, 1) == {"ir": 4.0, "triton": 3.0}
    written = json.loads(path.read_text())["measured"]
    assert [(r["op"], r["architecture"], r["elements"]) for r in written] == [
        ("inv_rope", SM90, 128),
        ("q_norm_rope", "x", 128),
        ("q_norm_rope", SM90, 640),
        ("q_norm_rope", SM90, 1280),
        ("q_norm_rope", SM90, 1280),
    ]
    assert written[-2] == {"op": "q_norm_rope", "elements": 1280, "tokens": 20, "ir_us": 4.0, **stamp}
    assert measured.nearest("q_norm_rope", SM90, 128, 1, impls=["ir"]) == {"ir": 7.0}
    assert measured.nearest("q_norm_rope", SM90, 1280) == {"ir": 4.0, "triton": 3.0}
    assert measured.nearest("q_norm_rope", SM90, 1280, impls=["ir"]) == {"ir": 4.0}
    assert measured.nearest("q_norm_rope", SM90, 1280, impls=["eager"]) is None
    measured._entries.cache_clear()


def test_tables_of_concurrent_runs_are_both_kept_and_written_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "measured.json"
    monkeypatch.setattr(measured, "RECORD", path)
    path.write_text(json.dumps({"measured": []}))
    measured._entries.cache_clear()
    assert measured.nearest("q_norm_rope", SM90, 1) is None
    path.write_text(json.dumps({"measured": [TABLE[0]]}))  # by a second run, after this one has read the file
    stamp = {"architecture": SM90, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02T03:04:05+00:00"}
    rows = [{"op": "inv_rope", "elements": 640, "impl": impl, "us": 4.0} for impl in measured.CANDIDATES]
    assert measured.update({"rows": rows, **stamp}) == 1
    table_text = path.read_text()
    assert [row["op"] for row in json.loads(table_text)["measured"]] == ["q_norm_rope", "inv_rope"]

    def interrupted(new: Path, path: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured.update({"rows": rows, **stamp})
    assert path.read_text() == table_text
    measured._entries.cache_clear()


def test_the_record_in_the_package_can_be_read_and_keys_the_compile_cache() -> None:
    for row in json.loads(measured.RECORD.read_text())["measured"]:
        assert row["op"] in OPS
        assert row["elements"] > 0
        assert min(us for name, us in row.items() if name.endswith("_us")) > 0
    names = {name for name, _ in passes.sources()}
    assert {"/selection/measured.json", "/selection/proven.json"} <= names
