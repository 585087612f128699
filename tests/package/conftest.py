"""Fixtures with the sources of the repository, parsed once, and with fresh interpreters."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("dsv4_compile", "lowering", "kernels")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    """Return the text of every library file by its path from the root."""
    files = sorted(path for folder in LIBRARY for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


@pytest.fixture(scope="session")
def trees(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(text, path) for path, text in sources.items()}


@pytest.fixture
def fresh_python() -> Callable[..., str]:
    """Run code in a new interpreter that finds packages in `path` only, and return what it prints."""

    def run(code: str, *, path: tuple[Path, ...] = (ROOT,), cwd: Path | str = "/", check: bool = True) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DSV4_"))}
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + ("" if check else done.stderr)

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this tree, from a copy, so that no build folder appears in the repository."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in LIBRARY:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))
