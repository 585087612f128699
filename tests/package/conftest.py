"""Fixtures with the sources of the repository, parsed once, and with fresh interpreters."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


class Distributions(NamedTuple):
    """A wheel and an sdist of this tree, and the output of setuptools while it built them."""

    wheel: Path
    sdist: Path
    log: str


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build both from a copy, so that no build folder appears in the repository."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("distributions")
    for folder in (*LIBRARY, "examples"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
        "README.md",
        "pyproject.toml",
    ):
        shutil.copy(ROOT / name, copy)
    (copy / "tests").mkdir()
    for name in ("test.py", "test.json"):  # a pattern of MANIFEST.in without a file is a warning
        (copy / "tests" / name).touch()
    build = f"from setuptools import build_meta as b; print(b.build_sdist({str(out)!r}), b.build_wheel({str(out)!r}))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "default", "-c", build]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=120, check=True)
    return Distributions(next(out.glob("*.whl")), next(out.glob("*.tar.gz")), done.stdout + done.stderr)


@pytest.fixture(scope="session")
def wheel(distributions: Distributions) -> Path:
    return distributions.wheel


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return folder
