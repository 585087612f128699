"""Tests marked `interpreted` run in Triton's interpreter, in one child process for each file.

Triton decides when it is imported whether kernels are compiled or interpreted, so the parent hands the marked tests
that it has collected from a file to a child started with TRITON_INTERPRET=1, and reports each with the child's outcome.
The children are forks of an interpreter that has imported Triton so.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.warm import WarmPython

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REPORT = "DSV4_INTERPRETED_REPORT"
OUTCOMES = pytest.StashKey[dict[str, str]]()
ASKED = pytest.StashKey[set[Path]]()
WARM = pytest.StashKey[WarmPython]()
WITHOUT_PLUGINS = [word for name in ("xdist", "cacheprovider", "anyio") for word in ("-p", f"no:{name}")]
IMPORTED = (
    "pytest",
    "hypothesis.extra.numpy",
    "tests.support.fake_triton",
    "tests.support.quick_interpreter",
    "torch._dynamo",
    "triton.runtime.interpreter",
    "dsv4_compile.testing",
)

if INTERPRETED:
    from tests.support.fake_triton import round_like_hardware
    from tests.support.quick_interpreter import quicken

    round_like_hardware()
    quicken()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: needs Triton's interpreter; runs in a child process")
    config.stash[OUTCOMES] = {}
    config.stash[ASKED] = set()
    config.stash[WARM] = WarmPython(IMPORTED, os.environ | {"TRITON_INTERPRET": "1"})


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[WARM].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In the parent, report what the child found instead of calling the test."""
    if INTERPRETED or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    outcomes, asked = pyfuncitem.config.stash[OUTCOMES], pyfuncitem.config.stash[ASKED]
    if pyfuncitem.path not in asked:
        asked.add(pyfuncitem.path)
        outcomes.update(_run_child(pyfuncitem))
    outcome = outcomes.get(pyfuncitem.nodeid, "the child process ended before this test")
    if outcome:
        pytest.fail(outcome, pytrace=False)
    return True


def _run_child(first: pytest.Function) -> dict[str, str]:
    """Outcome by node id, "" for passed, of all tests of a file that this session is to run interpreted."""
    session, config = first.session, first.config
    items = [item for item in session.items if item.path == first.path and item.get_closest_marker("interpreted")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes"
        report.touch()
        arguments = [*WITHOUT_PLUGINS, "-q", f"--rootdir={config.rootpath}"]
        arguments += [f"--seed={config.option.seed}", *(item.nodeid for item in items)]
        done = config.stash[WARM].run("pytest", *arguments, **{REPORT: str(report)})
        outcomes = dict(json.loads(line) for line in report.read_text().splitlines())
    return outcomes or {item.nodeid: f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}" for item in items}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child, write down how each test ended."""
    path = os.environ.get(REPORT)
    if path and (report.failed or report.when == "call"):
        outcome = "\n".join([report.longreprtext, *(text for _, text in report.sections)]) if report.failed else ""
        with open(path, "a") as file:
            file.write(json.dumps([report.nodeid, outcome]) + "\n")
