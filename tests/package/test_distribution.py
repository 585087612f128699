"""Tests that pyproject.toml lists the packages of the tree, and that the wheel contains them."""

from __future__ import annotations

import posixpath
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
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
    pages = [str(page.relative_to(root)) for page in (root / "dsv4_compile" / "docs").rglob("*") if page.is_file()]
    assert {".md", ".html", ".json", ".png", ".svg"} == {Path(page).suffix for page in pages}
    mapped = [path if path.startswith("dsv4_compile/") else f"dsv4_compile/{path}" for path in sources]
    records = [str(path.relative_to(root)) for path in (root / "dsv4_compile" / "selection").glob("*.json")]
    native = [f"dsv4_compile/cpu/native/{name}" for name in ("common.h", "kernels.cpp", "products.cpp", "sums.h")]
    data = ["dsv4_compile/py.typed", "dsv4_compile/kernels/README.md", *native, *records]
    assert sorted(names) == sorted([*mapped, *pages, *data])


def test_setuptools_has_nothing_to_warn_of(distributions: Any) -> None:
    lines = [line for line in distributions.log.splitlines() if re.search(r"warn|deprecat|ambig", line, re.I)]
    assert lines == []


def test_every_link_of_readme_leads_to_a_file_of_the_sdist(distributions: Any) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        readme = archive.extractfile(
            next(name for name in archive.getnames() if name.count("/") == 1 and "README" in name)
        )
        assert readme is not None
        links = links_of(readme.read().decode())
    assert len(links) > 20
    assert sorted(links - names) == []


def test_links_of_every_page_in_the_wheel_lead_to_files_of_the_wheel_or_of_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        pages = {
            name: archive.read(name).decode() for name in names if re.fullmatch(r"dsv4_compile/docs/[^/]*\.md", name)
        }
    inside = {f"dsv4_compile/docs/{link}" for text in pages.values() for link in links_of(text) if "../.." not in link}
    assert len(inside) > 5
    assert sorted(link for link in inside if posixpath.normpath(link) not in names) == []


def links_of(page: str) -> set[str]:
    """Return the files that a page links, without places in them."""
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page, flags=re.S))
    return {link.partition("#")[0] for link in links if "://" not in link} - {""}


def test_installed_package_works_outside_of_the_repository(fresh_python: Callable[..., str], site: Path) -> None:
    code = """
import sys
from pathlib import Path
import dsv4_compile
from dsv4_compile import cli, doctor
print(Path(dsv4_compile.__file__).parent)
print(cli.main(["explain", "replay"]), cli.main(["explain", "E204"]))
doctor.OP_TESTS = dict(list(doctor.OP_TESTS.items())[:1])
checks = doctor.examine()
print([check.name for check in checks if check.level == "fix" and check.name != "C++ compiler"])
print(Path(cli.DOCS, "replay_csa_h100.png").stat().st_size > 10_000)
"""
    out = fresh_python(code, path=(site,)).splitlines()
    assert out[0] == str(site / "dsv4_compile")
    assert out[-3:] == ["0 0", "[]", "True"]


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
    for package, (_, lowest, _) in OPTIONAL.items():
        needs = [need for name, extra in extras.items() if name != "test" for need in extra if need.startswith(package)]
        assert f"{package}>={'.'.join(map(str, lowest))}" in needs, package
        assert package not in needs, f"{package} without a lowest version"
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
