"""Tests of tests/thorough.py: a run of all tests leaves out those of the table, a run of a file leaves out none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.thorough import LEFT_OUT, left_out, unknown
from tests.warm import ROOT

TABLE = {"a/test_a.py": ("test_sum[float32]", "test_all", "TestIt::test_one")}
NAMES = ["test_sum[float32]", "test_sum[bfloat16]", "test_all[1]", "test_all[2]", "test_allow", "TestIt::test_one"]


def test_names_are_of_one_test_or_of_all_its_parameters() -> None:
    out = left_out("a/test_a.py", NAMES, TABLE)
    assert out == {"test_sum[float32]", "test_all[1]", "test_all[2]", "TestIt::test_one"}
    assert left_out("b/test_a.py", NAMES, TABLE) == set()


def test_a_name_without_a_test_is_reported() -> None:
    assert unknown("a/test_a.py", NAMES, TABLE) == []
    assert unknown("a/test_a.py", NAMES[1:], TABLE) == ["test_sum[float32]"]
    assert unknown("a/test_a.py", [], TABLE) == list(TABLE["a/test_a.py"])


def pytest_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("paths", [[], ["tests/tools/test_counts.py"]], ids=["all tests", "a file"])
def test_a_run_with_a_path_leaves_out_nothing(paths: list[str]) -> None:
    """Only a file without heavy imports is collected: `testpaths` is that of a run without paths."""
    done = pytest_of("--collect-only", "-o", "testpaths=tests/tools/test_counts.py", *paths)
    if paths:
        assert done.returncode == 0 and "test_report_names_every_count" in done.stdout
    else:
        [error] = [line for line in (done.stdout + done.stderr).splitlines() if "tests that do not exist" in line]
        assert f"{next(iter(LEFT_OUT))}::" in error and "test_counts.py" not in error


def test_processes_that_share_a_run_leave_out_nothing_either() -> None:
    done = pytest_of("-n", "1", "tests/tools/test_counts.py", "-k", "an_op_are_counted")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
