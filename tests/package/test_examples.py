"""Tests that every example runs as a program, from any folder, and has a docstring with its command."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.warm import ROOT, WarmPython

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
ELSEWHERE = ("08_vllm", "10_serve")
"""Examples that `make test-vllm` and `make test-serve` run."""
COMPILES_CPP = "02_huggingface_generate"
"""Example that compiles C++. In the others Inductor calls PyTorch, which takes half of the time."""
TRACED = "11_v41"
"""Example with a graph that takes the compiler longest; tests/models/v41 compiles a model with the same layers."""
TRAINS = "09_drafts"
"""Example that trains a model, here a smaller one."""
ALONE = "05_batch_metadata"
"""Example in a separate interpreter. The others are forks of one that has imported their modules."""
# C++ without vector instructions compiles in two thirds of the time; `dsv4 demo` compiles it with them.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
LIBRARIES = ("torch._inductor.compile_fx", "transformers.models.deepseek_v4.modeling_deepseek_v4")


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    """An interpreter that has imported libraries, but not the package: its import is part of an example."""
    warm = WarmPython(LIBRARIES, ENVIRONMENT, 600)
    yield warm
    warm.close()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.stem not in (*ELSEWHERE, ALONE)], ids=lambda path: path.stem
)
def test_example_runs(example: Path, warm: WarmPython, tmp_path: Path) -> None:
    options = {COMPILES_CPP: "cpp", TRACED: "traced", TRAINS: "--quick"}.get(example.stem, "")
    done = warm.run("tests.package.example", str(example), str(tmp_path), *options.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_picture_of_architecture_is_that_of_the_example(tmp_path: Path) -> None:
    """Draw it again with `python examples/05_batch_metadata.py dsv4_compile/docs/batch_metadata.png`."""
    picture = ROOT / "dsv4_compile" / "docs" / "batch_metadata.png"
    assert f"]({picture.name})" in picture.with_name("architecture.md").read_text()
    assert picture.stat().st_size < 100_000
    command = [sys.executable, str(ROOT / "examples" / f"{ALONE}.py"), "new.png"]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=600, check=True)
    old, new = (Image.open(path) for path in (picture, tmp_path / "new.png"))
    assert old.size == new.size and old.info["Description"] == new.info["Description"]


def test_first_snippet_of_the_readme_runs_as_pasted(warm: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0])
    done = warm.run("tests.package.example", str(script), str(tmp_path), "small")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_a_docstring_that_gives_its_command_and_a_main(example: Path) -> None:
    tree = ast.parse(example.read_text())
    assert f"python examples/{example.name}" in (ast.get_docstring(tree) or "")
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
