"""Tests of the claims that `dsv4 demo` prints. Graphs are traced and counted here and run in test_compiled.py."""

from __future__ import annotations

import json

import pytest
from transformers import DeepseekV4Config

from dsv4_compile.hf import demo, tiny


def test_every_claim_is_true(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TIMED_STEPS", 6)  # prompts close a group of 128 in them
    arguments = ["--tokens", "8", "--json", "--backend", "eager", "--device", "cpu", "--model", "tiny"]
    assert demo.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"]
    _, ours, drafted = printed["rows"]
    assert [row["name"] for row in printed["rows"]] == ["eager transformers", "compiled, eager", "drafts, uncompiled"]
    assert (ours["graphs"], ours["breaks"], ours["recompiles"]) == (2, 0, 0)
    assert ours["tokens"] == drafted["tokens"] == "identical"
    assert 1.5 < drafted["tokens_per_step"] <= 6 and ours["tokens_per_step"] == 1
    assert 0 < ours["max_logit_difference"] < 1e-4
    assert ours["tokens_per_second"] == pytest.approx(4e3 / ours["ms_per_step"])


ROWS = [
    demo.Row("eager transformers", None, None, None, None, None, "reference", 12.3, 325.2, "tiny"),
    demo.Row("compiled, dsv4", 2, 0, 0, 61.4, 3.1e-6, "identical", 4.5, 888.9, "tiny"),
    demo.Row("stock torch.compile", 12, 10, 10, 161.4, None, "-", 13451.1, 0.1, "tiny"),
]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_reports_whether_the_claims_hold(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, header, rule, *lines = demo._table(ROWS, ok=True).splitlines()
    starts = [header.index(row.name) for row in ROWS]
    cells = {line[: starts[0]].strip(): [line[start:].split()[0] for start in starts] for line in lines[:9]}
    assert cells["graphs"] == ["-", "2", "12"] and cells["tokens"] == ["reference", "identical", "-"]
    assert cells["tokens a step"] == ["1", "1", "1"]
    assert cells["ms a step"] == ["12.3", "4.5", "13451.1"] and cells["tokens a second"] == ["325", "889", "0"]
    assert "no break, no recompile" in " ".join(lines[9:]) and set(rule) == {"-"}
    assert max(map(len, [header, rule, *lines, *demo.NEXT.splitlines()])) <= width
    assert len(demo.NEXT.splitlines()) == 3
    assert "does not match" in " ".join(demo._table(ROWS, ok=False).split())


def test_a_demo_of_one_token_raises() -> None:
    with pytest.raises(ValueError, match=r"E204(.|\n)*--tokens 1"):
        demo.main(["--tokens", "1"])


def test_sizes_of_v4_flash_are_those_that_transformers_gives_a_model() -> None:
    config = DeepseekV4Config()
    assert {name: getattr(config, name) for name in tiny.FLASH} == tiny.FLASH
    shared = ("head_dim", "qk_rope_head_dim", "hc_sinkhorn_iters", "sliding_window", "index_head_dim", "index_topk")
    assert all(tiny.REAL_ATTENTION[name] == tiny.FLASH[name] for name in shared)
