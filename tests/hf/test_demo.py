"""Tests of the claims that `dsv4 demo` prints. Graphs are traced and counted here and run in test_compiled.py."""

from __future__ import annotations

import json

import pytest

from dsv4_compile.hf import demo


def test_every_claim_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--tokens", "8", "--json", "--backend", "eager", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"]
    eager, ours = printed["rows"]
    assert eager["name"] == "transformers, eager"
    assert (ours["graphs"], ours["breaks"], ours["recompiles"]) == (2, 0, 0)
    assert ours["tokens"] == "identical"
    assert 0 < ours["max_logit_difference"] < 1e-4
    assert ours["ms_per_step"] > 0


ROWS = [
    demo.Row("transformers, eager", None, None, None, None, None, "reference", 12.3),
    demo.Row('converted, backend="dsv4"', 2, 0, 0, 61.4, 3.1e-6, "identical", 4.5),
]


def test_the_table_is_aligned_and_reports_whether_the_claims_hold() -> None:
    table = demo._table(ROWS, ok=True)
    _, header, rule, first, second, _, verdict = table.splitlines()
    assert len({len(line) for line in (header, rule, first, second)}) == 1
    assert first.split()[-1] == "12.3"
    assert second.split()[-7:] == ["2", "0", "0", "61", "3.1e-06", "identical", "4.5"]
    assert "no break, no recompile" in verdict
    assert "does not match" in demo._table(ROWS, ok=False)


def test_a_demo_of_one_token_raises() -> None:
    with pytest.raises(ValueError, match=r"E204(.|\n)*--tokens 1"):
        demo.main(["--tokens", "1"])
