"""Tests that pyproject.toml lists the packages of the tree, and that the wheel contains them."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def test_package_list_equals_the_tree(project: dict[str, Any], sources: dict[str, str]) -> None:
    folders = {".".join(Path(path).parent.parts) for path in sources} | {"kernels"}  # kernels/ itself has a README only
    packages = {name if name.startswith("dsv4_compile") else f"dsv4_compile.{name}" for name in folders}
    assert sorted(packages) == project["tool"]["setuptools"]["packages"]


def test_every_folder_of_the_package_is_a_package(root: Path) -> None:
    folders = {path.parent for path in (root / "dsv4_compile").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, sources: dict[str, str], root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    pages = [str(page.relative_to(root)) for page in (root / "dsv4_compile" / "docs").rglob("*.md")]
    mapped = [path if path.startswith("dsv4_compile/") else f"dsv4_compile/{path}" for path in sources]
    records = [str(path.relative_to(root)) for path in (root / "dsv4_compile" / "selection").glob("*.json")]
    native = [f"dsv4_compile/cpu/native/{name}" for name in ("common.h", "kernels.cpp", "products.cpp", "sums.h")]
    data = ["dsv4_compile/py.typed", "dsv4_compile/kernels/README.md", *native, *records]
    assert sorted(names) == sorted([*mapped, *pages, *data])


def test_wheel_declares_the_command_the_backend_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA")).rsplit("/", 1)[0]
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "[torch_dynamo_backends]\ndsv4 = dsv4_compile.backend:dsv4\n" in entry_points
    assert "[console_scripts]\ndsv4 = dsv4_compile.cli:main\n" in entry_points
    assert "License-Expression: Apache-2.0\n" in metadata


def test_torch_is_never_capped_so_pip_never_replaces_it(project: dict[str, Any]) -> None:
    assert [need for need in project["project"]["dependencies"] if need.startswith("torch")] == ["torch>=2.11"]


def test_doctor_and_pyproject_name_the_same_versions(project: dict[str, Any]) -> None:
    from dsv4_compile._compat import TORCH_FIRST
    from dsv4_compile.doctor import OPTIONAL, PYTHON_WINDOW, TESTED_TO

    extras = project["project"]["optional-dependencies"]
    assert f"torch>={'.'.join(map(str, TORCH_FIRST))}" in project["project"]["dependencies"]
    assert project["project"]["requires-python"] == f">={'.'.join(map(str, PYTHON_WINDOW[0]))}"
    transformers = ".".join(map(str, OPTIONAL["transformers"][1]))
    assert f"transformers>={transformers}" in extras["hf"]
    for package, (major, minor) in TESTED_TO.items():
        assert f"{package}<{major}.{minor + 1}" in extras[OPTIONAL[package][0]]
    for package, (extra, _, _) in OPTIONAL.items():
        assert any(need.startswith(package) for need in extras[extra]), package


@pytest.mark.parametrize(
    ("version", "level"), [("5.16.3", "warn"), ("5.17.0", "ok"), ("5.24.9", "ok"), ("5.25.0", "warn")]
)
def test_doctor_warns_of_unsupported_versions(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_compile import doctor

    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    found = doctor._optional(*doctor.OPTIONAL["transformers"], "transformers")
    assert (found.value, found.level, bool(found.note)) == (version, level, level == "warn")
