"""Reports on the Triton generated for the cases of an op: `cases_<op>.py` for `test_<op>.py` and `test_<op>_triton.py`.

They are made in processes of their own: Triton reads TRITON_INTERPRET when it is imported, and the stand-ins for a GPU
stay for the rest of a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Reports = dict[str, dict[str, Any]]


def _reports(request: pytest.FixtureRequest, **environment: str) -> Reports:
    op = request.path.stem.removeprefix("test_").removesuffix("_triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "tests.lowering.generated", op]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reports: Reports = json.loads(done.stdout.splitlines()[-1])
    return reports


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> Reports:
    """Every case, run in the interpreter and compared with the reference."""
    return _reports(request, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Reports:
    """The cases that are compiled for every target GPU."""
    return _reports(request)
