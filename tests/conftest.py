"""Fixtures of every test: a separate seed, and no compiled code left over from the test before."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from dsv4_compile.cpu import native
from dsv4_compile.testing import poisoned_empty
from tests.covering import not_needed
from tests.gemm_orders import by_size
from tests.log_handlers import keep_handlers
from tests.quick_compiler import COMPILER, quicken_if_imported
from tests.thorough import LEFT_OUT, left_out, unknown

if not torch.cuda.is_available():
    collect_ignore = ["gpu"]

# The order of a sum depends on the number of threads; without a request for more, all machines add in the same order.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# `--hypothesis-profile=long` is for a nightly run. The default draws the same examples on every machine.
hypothesis.settings.register_profile("short", max_examples=30, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("short")

LONGEST = (
    "parallel/test_ranks.py",
    "lowering/preprocess/test_compress_norm_rope_insert.py",
    "hf/test_expected_modules.py",
    "models/v41/test_transformers.py",
    "lowering/attention/test_inv_rope.py",
    "hf/test_redundant_guards.py",
    "backend/test_fuse_layer.py",
    "hf/test_load_drafts.py",
    "models/v41/test_side_roads.py",
    "ops/test_all_ops.py",
    "hf/test_warm_up.py",
    "models/v41/test_running.py",
    "package/test_examples.py",
    "attention_backends/test_conformance.py",
    "hf/test_layer_kinds.py",
    "backend/test_fuse_streams.py",
    "kernels/moe/test_moe_experts.py",
    "hf/test_call_checks.py",
    "hf/test_draft_generate.py",
    "models/v41/test_transformers_drafts.py",
    "hf/test_running_batch.py",
    "debug/test_breaks.py",
    "backend/test_regions.py",
    "hf/test_load.py",
    "parallel/test_watchdog.py",
)
"""The files that take longest where nothing has been compiled yet, longest first."""

ON_RANKS = ("parallel/test_ranks.py", "parallel/test_watchdog.py", "debug/test_diverge_ranks.py")
"""Files with processes forked from one server, which takes ten seconds to import their modules."""

OF_A_WHEEL = ("package/test_distribution.py", "package/test_kernels_name.py")
"""Files with tests of a wheel that is built and installed once in a process."""

COMPILED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="other random inputs for every test (default: 0)")
    parser.addoption("--gemms-by-size", action="store_true", help="see tests/gemm_orders.py")
    parser.addoption("--compile", choices=("changed", "all", "record"), help="see tests/tools/compiled_facts.py")
    parser.addoption("--thorough", action="store_true", help="without a path, tests of tests/thorough.py too")
    parser.addoption("--steps", type=int, default=500, help="random decode steps of tests/gpu (default: 500)")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which tests this machine cannot run, so that a green run is not read as more than it is."""
    missing = [] if torch.cuda.is_available() else ["no CUDA device: tests/gpu is not collected"]
    capability = torch.backends.cpu.get_cpu_capability()
    torch_line = f"torch {torch.__version__}, {torch.get_num_threads()} threads, CPU capability {capability}"
    some = [] if config.option.thorough else ["without the tests of tests/thorough.py: make test-all runs them"]
    return [f"{torch_line}, --seed {config.option.seed}", *missing, *some]


def pytest_configure(config: pytest.Config) -> None:
    if config.option.compile:
        os.environ["DSV4_COMPILE"] = config.option.compile
    config.stash[COMPILED] = 0
    keep_handlers()
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        config.option.thorough = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what tests asked of compiled kernels, or let the first process say how many are not in the record."""
    facts = sys.modules.get("tests.tools.compiled_facts")
    if facts is None:
        return
    if facts.RECORD.mode == "record":
        facts.RECORD.write()
    elif hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiled"] = facts.RECORD.compiled
    else:
        session.config.stash[COMPILED] += facts.RECORD.compiled


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[COMPILED] += getattr(node, "workeroutput", {}).get("compiled", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash[COMPILED]:
        terminalreporter.write_line(f"{count} kernels were compiled that are not recorded: make kernels records them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: a process that takes one up last is waited for alone."""
    if not config.option.thorough:
        leave_out(config, items)
    places = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def name_in_file(item: pytest.Item) -> str:
    """Return the name of a test in its file, such as "TestSums::test_empty[float32]"."""
    return item.nodeid.partition("::")[2]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of tests/thorough.py and sets of tests/covering.py, and refuse names without a test."""
    names: dict[str, list[str]] = {file: [] for file in LEFT_OUT}
    files = [item.path.relative_to(Path(__file__).parent).as_posix() for item in items]
    for item, file in zip(items, files, strict=True):
        names.get(file, []).append(name_in_file(item))
    if missing := [f"{file}::{name}" for file in LEFT_OUT for name in unknown(file, names[file])]:
        raise pytest.UsageError(f"tests/thorough.py names {len(missing)} tests that do not exist: {missing[:9]}")
    out = {f"tests/{file}::{name}" for file in LEFT_OUT for name in left_out(file, names[file])}
    out |= {item.nodeid for item in not_needed([item for item in items if item.nodeid not in out])}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, all files of ON_RANKS to the same, and those of OF_A_WHEEL."""
    from xdist.scheduler import LoadFileScheduling  # not everywhere

    class FilesThatShare(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "ranks" if scope.endswith(ON_RANKS) else "a wheel" if scope.endswith(OF_A_WHEEL) else scope

    return FilesThatShare(config, log) if config.getvalue("dist") == "loadfile" else None


def freeze() -> None:
    """Exclude all objects of this moment from later garbage collections."""
    gc.collect()
    gc.freeze()


@functools.cache
def freeze_compiler() -> None:
    """Exclude the compiler, once it has been imported: tests that collect garbage would look through it each time."""
    freeze()
    quicken_if_imported()


def pytest_collection_finish() -> None:
    """Spare torch and all tests the search for garbage while graphs are compiled: 5 to 9% of that time."""
    quicken_if_imported()
    freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Print, with a failure, how to draw the same inputs again."""
    report = yield
    if report.failed and "seed" in getattr(item, "funcargs", {}):
        again = f"torch.manual_seed({item.funcargs['seed']}); pytest --seed {item.config.option.seed} '{item.nodeid}'"
        report.sections.append(("inputs", again))
    return report


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed `random`, NumPy and torch from the test's name: every case differs, and every failure repeats."""
    value = zlib.crc32(f"{request.node.nodeid}{request.config.option.seed or ''}".encode())
    random.seed(value)
    np.random.seed(value)
    # torch.manual_seed keeps the traceback of each call for devices that may come later: half a millisecond.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(value)
    return value


@pytest.fixture(scope="session", autouse=True)
def calls_of_torch() -> None:
    """Leave C++ kernels for CPUs to their own tests: others compare bits of ops, some after a graph was compiled."""
    native._state["loaded"] = None


@pytest.fixture(scope="session", autouse=True)
def gemms(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--gemms-by-size`, sum every GEMM of torch in an order that its sizes decide."""
    with by_size() if request.config.option.gemms_by_size else nullcontext():
        yield


@pytest.fixture
def gemms_by_size() -> Iterator[None]:
    """Run the test with GEMMs that have different bits for different sizes."""
    with by_size():
        yield


def reset_compiler() -> None:
    """Forget compiled code."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if COMPILER in sys.modules:
        freeze_compiler()


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled code after each test, so that no test uses up the recompile limit of a later one.

    Tests of a file with SHARES_GRAPHS use what the first one compiled.
    """
    yield
    if not getattr(request.module, "SHARES_GRAPHS", False):
        reset_compiler()


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler_after_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled code after a file with SHARES_GRAPHS."""
    yield
    if getattr(request.module, "SHARES_GRAPHS", False):
        reset_compiler()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Run the test with fresh memory full of NaN, in library code too."""
    with poisoned_empty():
        yield
