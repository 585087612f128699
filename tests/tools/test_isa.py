"""Tests of tests/tools/isa.py, and its sample: fused against unfused as on CPUs with and without AVX-512."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import isa

CAPABILITIES = {"baseline": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}


@pytest.mark.parametrize("level", CAPABILITIES)
def test_bits_are_equal_as_on_another_cpu(level: str) -> None:
    command = [sys.executable, isa.__file__, "--sample", "--level", level]
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
