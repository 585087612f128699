"""Reports on the Triton generated for the cases of an op: `cases_<op>.py` for `test_<op>.py` and `test_<op>_triton.py`.

They are made in separate processes: Triton reads TRITON_INTERPRET when it is imported, and the stand-ins for a GPU
stay for the rest of a process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_compile.lowering import registry
from tests.lowering.recorded import assembled, is_recorded
from tests.support.selected import values_of
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


def _generated(warm: WarmPython, what: str, *cases: str) -> Any:
    done = warm.run("tests.lowering.generated", what, *cases)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, interpreting: WarmPython) -> Reports:
    """Every case, run in the interpreter and compared with the reference.

    Where tests/thorough.py leaves out cases: those that tests of the file have as a parameter.
    """
    what = request.path.stem.removeprefix("test_").removesuffix("_triton")
    cases = [] if request.config.option.thorough else values_of("case", request)
    reports: Reports = _generated(interpreting, f"{request.path.parent.name}.cases_{what}", *cases)
    return reports


@pytest.fixture(scope="module")
def compiled(interpreted: Reports, compiling: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """By case that is compiled for every target GPU: whether the very kernels that were interpreted have binaries."""
    cases = {case: report["sources"] for case, report in interpreted.items() if report["sources"] is not None}
    changed = {case: {"sources": sources} for case, sources in cases.items() if not is_recorded(sources)}
    reports = {}
    if changed:
        path = tmp_path_factory.mktemp("generated") / "reports.json"
        path.write_text(json.dumps(changed))
        reports = _generated(compiling, str(path))
    return {case: {"binaries": assembled(sources, reports.get(case, {}))} for case, sources in cases.items()}


@pytest.fixture(scope="module", autouse=True)
def lowered_to_cpp() -> Iterator[None]:
    """Let `auto` use lowerings on a CPU too, as it does on GPUs: these tests compare what they give."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "COMPILES_LONG", "")
        yield
