"""Tests that every example runs as a program, from any folder, and has a docstring with its command."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("0*.py"))
COMPILES_CPP = "02_huggingface_generate"
"""Example whose C++ is compiled. In the others Inductor calls PyTorch, which takes half of the time."""
WITHOUT_CPP = """
import runpy, sys
from torch._inductor import config
config.fallback_by_default = True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    # C++ without vector instructions compiles in two thirds of the time; `dsv4 demo` compiles it with them.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    command = [sys.executable, *([] if example.stem == COMPILES_CPP else ["-c", WITHOUT_CPP]), str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_a_docstring_that_gives_its_command_and_a_main(example: Path) -> None:
    tree = ast.parse(example.read_text())
    assert f"python examples/{example.name}" in (ast.get_docstring(tree) or "")
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
