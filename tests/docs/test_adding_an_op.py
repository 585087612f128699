"""The op that docs/adding-an-op.md adds: its files are taken out of the page, imported and tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "dsv4_compile" / "docs" / "adding-an-op.md"
FILES = dict(re.findall(r"^`([\w/]+\.py)`\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))

PROGRAM = """
import importlib.util, sys
from pathlib import Path
import dsv4_compile.ops
from dsv4_compile.lowering import registry

for path in map(Path, sys.argv[1:]):
    name = ".".join(path.with_suffix("").parts).replace("lowering.", "dsv4_compile.lowering.")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name.startswith("dsv4_compile."):
        package = importlib.import_module(name.rpartition(".")[0])
        setattr(package, path.stem, module)
    if ".lowering." in name:
        registry.load()
    spec.loader.exec_module(module)
ran = [test() or name for name, test in list(vars(module).items()) if name.startswith("test_")]
print(len(ran))
"""


def test_page_has_a_file_of_each_tree() -> None:
    assert [path.split("/linear/")[0] for path in FILES] == [
        "dsv4_compile/reference",
        "dsv4_compile/ops",
        "lowering",
        "tests/ops",
    ]
    assert [path for path in FILES if (ROOT / path).exists()] == [], "an example that exists shows nothing"


def test_op_of_the_page_passes_the_tests_of_the_page(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    # A separate process: an op that is defined stays defined, and other tests look at all ops.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *FILES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) == len(re.findall(r"^def test_", FILES[list(FILES)[-1]], re.M)) >= 3


@pytest.mark.parametrize("path", FILES)
def test_example_keeps_the_style_of_the_house(path: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", path, "-"]
    checked = subprocess.run(command, cwd=ROOT, input=FILES[path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    command = [sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", path, "-"]
    checked = subprocess.run(command, cwd=ROOT, input=FILES[path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
