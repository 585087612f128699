"""Tests of the interpreter that test jobs are forked from: jobs are isolated from each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import WarmPython


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the path of the module `job`, which a test writes and runs."""
    return tmp_path / "job.py"


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmPython]:
    warm = WarmPython(("colorsys",), os.environ | {"PYTHONPATH": str(tmp_path)})
    yield warm
    warm.close()


def test_a_job_is_a_module_run_with_arguments_and_variables(job: Path, warm: WarmPython) -> None:
    job.write_text(
        "import os, sys; print(__name__, sys.argv[1:], os.environ['GREETING']); print('no', file=sys.stderr)"
    )
    done = warm.run("job", "a", "b c", GREETING="hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ ['a', 'b c'] hello\n", "no\n")


def test_jobs_share_imports_and_nothing_else(job: Path, warm: WarmPython) -> None:
    job.write_text("import sys; print('colorsys' in sys.modules, hasattr(sys, 'left')); sys.left = 1; sys.exit(3)")
    for _ in range(2):
        done = warm.run("job")
        assert (done.returncode, done.stdout) == (3, "True False\n")


def test_a_crash_ends_only_its_job_and_keeps_the_output(job: Path, warm: WarmPython) -> None:
    job.write_text("import os, sys; print('before', flush=True); os.kill(os.getpid(), int(sys.argv[1]))")
    assert (done := warm.run("job", "11")).returncode == -11 and done.stdout == "before\n"
    job.write_text("raise ValueError('after')")
    done = warm.run("job")
    assert done.returncode == 1 and "ValueError: after" in done.stderr


def test_a_job_that_hangs_is_killed_and_the_next_one_runs(job: Path, warm: WarmPython) -> None:
    warm.limit = 1.0
    job.write_text("import time; time.sleep(60)")
    with pytest.raises(TimeoutError, match="job took more than"):
        warm.run("job")
    warm.limit = None
    job.write_text("print('again')")
    assert warm.run("job").stdout == "again\n"


def test_an_interpreter_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, BrokenPipeError)):
        WarmPython(("no_such_module",), dict(os.environ)).run("job")
