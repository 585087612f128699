"""Tests of examples/benchmarks/hca_long.py: plans and arguments."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)
from tests.tools.figures import ROOT

SCRIPT = ROOT / "examples" / "benchmarks" / "hca_long.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(SCRIPT)), run_name="script")


def test_a_size_compares_the_launchers_plan_with_others(script: dict[str, Any]) -> None:
    for batch, entries in script["SIZES"].values():
        plans = script["plans"](batch, entries)
        assert str(plans[0]) == "launcher" and len({str(plan) for plan in plans}) == len(plans) > 2
        assert all(plan.splits > 0 for plan in plans[1:])
        # No program is without keys.
        assert all(plan.splits <= layout.cdiv(entries, 64) + 2 for plan in plans[1:] if plan.block_h)


def test_every_request_has_all_entries_of_its_pages(script: dict[str, Any]) -> None:
    args = script["arguments"](2, 6, 0, torch.device("cpu"))
    window, entries = args[2], args[9]
    assert window.unique().numel() == window.numel() == 256 and entries.unique().numel() == entries.numel() == 12
    assert (entries.view(2, -1, script["BLOCK"]) % script["BLOCK"] == torch.arange(script["BLOCK"])).all()
    out, lse = REFERENCES["sparse_mla_decode"](*args)
    assert out.isfinite().all() and lse.isfinite().all()


def test_every_plan_of_a_size_has_a_row_that_says_whether_it_is_right(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names, cpu = script["rows"].__globals__, torch.device("cpu")
    script["SIZES"]["6 x 2"] = 2, 6
    reference, plans = REFERENCES["sparse_mla_decode"], script["plans"](2, 6)

    def run(plan: Any, *args: Any) -> Any:
        out, lse = reference(*args)
        return (out + 1 if plan == plans[1] else out), lse

    with mock.patch.dict(names, {"run": run, "kernels_us": lambda calls: {"k": 1.0}}):
        rows = list(script["rows"](["6 x 2"], cpu, float("inf")))
    assert [row["plan"] for row in rows] == list(map(str, plans))
    assert [bool(row["wrong"]) for row in rows] == [False, True, *[False] * (len(plans) - 2)]
    assert all(row["cold_us"] > 0 and row["floor_us"] > 0 for row in rows)
    assert capsys.readouterr().out.count("WRONG") == 1
