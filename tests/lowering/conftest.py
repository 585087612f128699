"""Reports on the Triton generated for the cases of an op: `cases_<op>.py` for `test_<op>.py` and `test_<op>_triton.py`.

They are made in processes of their own: Triton reads TRITON_INTERPRET when it is imported, and the stand-ins for a GPU
stay for the rest of a process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.warm import ROOT, WarmPython

Reports = dict[str, dict[str, Any]]
IMPORTED = ("torch._inductor.compile_fx", "tests.inductor_patterns", "tests.lowering.generated")


def _warm(**environment: str) -> Iterator[WarmPython]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    warm = WarmPython(IMPORTED, env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}, 300)
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def interpreting() -> Iterator[WarmPython]:
    yield from _warm(TRITON_INTERPRET="1")


@pytest.fixture(scope="session")
def compiling() -> Iterator[WarmPython]:
    yield from _warm()


def _generated(warm: WarmPython, what: str) -> Any:
    done = warm.run("tests.lowering.generated", what)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, interpreting: WarmPython) -> Reports:
    """Every case, run in the interpreter and compared with the reference."""
    what = request.path.stem.removeprefix("test_").removesuffix("_triton")
    reports: Reports = _generated(interpreting, f"{request.path.parent.name}.cases_{what}")
    return reports


@pytest.fixture(scope="module")
def compiled(interpreted: Reports, compiling: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of the cases that are compiled for every target GPU, the binaries of the very kernels that were interpreted."""
    path = tmp_path_factory.mktemp("generated") / "reports.json"
    path.write_text(json.dumps(interpreted))
    reports: Reports = {case: {"binaries": sizes} for case, sizes in _generated(compiling, str(path)).items()}
    return reports
