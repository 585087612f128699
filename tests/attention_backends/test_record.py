"""The table of conformance records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention_backends import record
from tests.attention_backends.systems import PHASES, Setup, library_setups


def made(architecture: str, day: str, **row: str) -> dict[str, Any]:
    rows = [{"system": "DSV4_PAGED", "cache": "fp8", "phase": phase, "eager": "passed", **row} for phase in PHASES]
    return {"architecture": architecture, "date": f"{day}T10:00:00+00:00", "rows": rows}


def test_table_has_a_row_for_each_cache_and_the_last_pass_of_each_device() -> None:
    text = record.table([made("cpu", "2026-11-20"), made("cuda sm_90", "2026-11-21", captured="passed")])
    assert text.splitlines() == [
        "| system | cache | decode | prefill | mixed |",
        "|---|---|---|---|---|",
        "| `DSV4_PAGED` | fp8 |" + " cpu 2026-11-20: eager<br>sm_90 2026-11-21: eager, captured |" * 3,
    ]


@pytest.mark.usefixtures("flash_mla")
def test_a_supported_library_has_separate_rows() -> None:
    setups = list(library_setups("cuda sm_90", ("decode",), (4,)))
    assert [(setup.system, setup.kv_cache_dtype) for setup in setups] == [
        ("FLASHMLA_SPARSE_DSV4, flash_mla", "fp8_ds_mla")
    ]
    assert not list(library_setups("cpu"))
    row = {"system": setups[0].system, "cache": "fp8_ds_mla", "phase": "decode", "eager": "passed"}
    text = record.table([{"architecture": "cuda sm_90", "date": "2026-11-20T10:00:00+00:00", "rows": [row]}])
    assert text.endswith("| `FLASHMLA_SPARSE_DSV4`, flash_mla | fp8_ds_mla | sm_90 2026-11-20: eager | - | - |")


def test_one_failed_check_fails_its_row() -> None:
    text = record.table([made("cpu", "2026-11-20", compiled="failed: not close")])
    assert text.count("FAILED") == 3


def test_outcome_is_passed_or_the_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("DSV4_PAGED", "bfloat16", 1, "decode")
    assert record.outcome(record.eager, setup, "cpu") == "passed"
    monkeypatch.setattr(record, "assert_close", lambda *_: torch.ones(1) + "one")
    assert record.outcome(record.eager, setup, "cpu").startswith("failed: ")
