"""examples/benchmarks/sparse_mla_counters.py: the profiler's output becomes rows of a record."""

from __future__ import annotations

import json
import runpy
import stat
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "sparse_mla_counters.py"


def test_rows_are_kernels_with_the_counters_names(tmp_path: Path) -> None:
    example = runpy.run_path(str(SCRIPT))
    metric = "gpu__time_duration.sum"
    tool = tmp_path / "ncu"
    lines = [
        "==PROF== noise",
        f'"ID","Kernel Name","{metric}"',
        '"","","ns"',
        '"0","attention","1,234.5"',
        '"1","join","7"',
    ]
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    first, second = example["counters"](str(tool), "decode:64:128", "triton")
    assert first == {"op": "decode", "heads": 64, "tokens": 128, "impl": "triton", "kernel": "attention", "ns": 1234.5}
    assert second["kernel"] == "join" and json.dumps(second)
    assert example["rows_of"]([]) == []


def test_a_profile_without_a_kernel_is_an_error() -> None:
    example = runpy.run_path(str(SCRIPT))
    with pytest.raises(RuntimeError, match="decode:64:1"):
        example["counters"]("/bin/false" if sys.platform != "darwin" else "/usr/bin/false", "decode:64:1", "triton")
