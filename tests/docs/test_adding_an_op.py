"""The op that docs/adding-an-op.md adds: its files are taken out of the page, imported and tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "dsv4_compile" / "docs" / "adding-an-op.md"
FILES = dict(re.findall(r"^`([\w/]+\.py)`\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))

OP = "clamped_swiglu"
COPIED = ("dsv4_compile", "kernels", "lowering", "tests", "pyproject.toml")
GENERIC = (
    "tests/package/test_rooms.py",
    "tests/ops/test_all_ops.py",
    "tests/kernels/test_every_kernel.py",
    "tests/kernels/test_specialization.py",
    "tests/kernels/host/test_launch_cache_of_ops.py",
    "tests/package/test_costs.py",
    "tests/package/test_call_costs.py",
    "tests/lowering/test_traced.py",
    "tests/lowering/test_registry.py",
)
"""Tests of all ops. They find the op of the page because its files exist."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout with the files of the page."""
    root = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        if (ROOT / name).is_dir():
            # With bytecode: compiling every file again would take longer than the tests.
            shutil.copytree(ROOT / name, root / name)
        else:
            shutil.copy2(ROOT / name, root / name)
    for path, text in FILES.items():
        (root / path).write_text(text)
    return root


def passed(checkout: Path, *arguments: str) -> int:
    """Run pytest in the copy, and return how many tests passed; all must."""
    # A separate process: an op that is defined stays defined, and other tests look at all ops.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
    (count,) = re.findall(r"(\d+) passed", done.stdout)
    return int(count)


def test_page_adds_a_file_to_each_tree_and_edits_none() -> None:
    assert [path.removesuffix(f"{OP}.py") for path in FILES] == [
        "dsv4_compile/reference/linear/",
        "dsv4_compile/ops/linear/",
        "dsv4_compile/testing/_samples_",
        "kernels/linear/",
        "tests/ops/linear/test_",
        "tests/kernels/linear/test_",
        "tests/gpu/linear/test_",
    ]
    assert len(FILES) <= 8
    assert [path for path in FILES if (ROOT / path).exists()] == [], "an example that exists shows nothing"


def test_op_of_the_page_passes_its_tests_and_those_of_all_ops(checkout: Path) -> None:
    mine = [path for path in FILES if path.startswith(("tests/ops", "tests/kernels"))]
    assert passed(checkout, *mine, *GENERIC, "-k", OP) >= 25


@pytest.mark.parametrize("path", FILES)
def test_example_keeps_the_style_of_the_house(path: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", path, "-"]
    checked = subprocess.run(command, cwd=ROOT, input=FILES[path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    command = [sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", path, "-"]
    checked = subprocess.run(command, cwd=ROOT, input=FILES[path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
