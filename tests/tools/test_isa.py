"""Tests of tests/tools/isa.py, and its sample: fused against unfused as on CPUs without vectors and with AVX2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import isa

CAPABILITIES = {"baseline": "DEFAULT", "avx2": "AVX2"}
"""Levels of the sample. On CPUs with AVX-512 all other tests run at the level above."""
ONE_ORDER = "not any_order_of_the_calls or nSCsc"
"""Tests of the sample: the order of calls decides what is fused, not the bits."""


@pytest.mark.parametrize("level", CAPABILITIES)
def test_bits_are_equal_as_on_another_cpu(level: str) -> None:
    command = [sys.executable, isa.__file__, "--sample", "--level", level, "-k", ONE_ORDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    skipped = isa.why_skipped(next(candidate for candidate in isa.LEVELS if candidate.name == level), isa.cpu()[1])
    assert f"{level}: {'skipped, ' + skipped if skipped else 'passed'}" in done.stdout
    assert skipped or f"CPU capability {CAPABILITIES[level]}," in done.stdout


def test_a_level_that_the_cpu_lacks_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(isa, "cpu", lambda: ("GenuineIntel", frozenset({"sse4_2", "avx2", "fma", "avx512f"})))
    monkeypatch.setattr(isa, "run", lambda level, *rest: (ran.append(level.name), level.name == "avx2")[1])
    assert isa.main([]) == 1
    assert ran == ["baseline", "avx2", "unlimited", "gemms-by-size"]
    printed = capsys.readouterr().out
    assert "avx512: skipped, this CPU has no avx512bw, avx512dq, avx512vl" in printed
    assert printed.endswith("failed: avx2\n")


def test_files_of_levels_exist() -> None:
    assert [name for name in isa.FILES if not Path(isa.ROOT, name).exists()] == []
