"""Tests that `import kernels` finds Hugging Face's package of that name, from a checkout and from a wheel.

transformers imports it, and a folder kernels/ with an __init__.py in this repository would shadow it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PROBE = """
import kernels
import dsv4_compile.kernels, dsv4_compile.lowering
print(getattr(kernels, "OWNER", kernels.__path__))
print(*dsv4_compile.kernels.__path__)
"""


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """Make a folder with a package named like Hugging Face's."""
    package = tmp_path / "hub" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("OWNER = 'Hugging Face'\n")
    return package.parent


@pytest.mark.parametrize("from_root", [True, False], ids=["from the repository root", "from elsewhere"])
def test_a_source_checkout_does_not_shadow_the_name(
    fresh_python: Callable[..., str], hugging_face: Path, root: Path, from_root: bool
) -> None:
    out = fresh_python(PROBE, path=(root, hugging_face), cwd=root if from_root else "/")
    owner, ours = out.splitlines()
    assert owner == "Hugging Face"
    assert Path(ours) == root / "kernels"


@pytest.mark.parametrize("from_root", [True, False], ids=["from the repository root", "from elsewhere"])
def test_an_installed_wheel_does_not_shadow_the_name(
    fresh_python: Callable[..., str], hugging_face: Path, root: Path, site: Path, from_root: bool
) -> None:
    # With `-c` the working directory comes first on the path; in the root the checkout would be imported.
    owner, ours = fresh_python(PROBE, path=(site, hugging_face), cwd=root if from_root else "/").splitlines()
    assert owner == "Hugging Face"
    assert Path(ours) == (root / "kernels" if from_root else site / "dsv4_compile" / "kernels")


def test_without_hugging_faces_package_the_name_has_no_file(fresh_python: Callable[..., str], root: Path) -> None:
    """transformers treats a module without a file and a version as not installed."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    assert fresh_python(code, cwd=root) == "None\n"


def test_the_two_folders_have_no_init(root: Path) -> None:
    assert [name for name in ("kernels", "lowering", "tests") if (root / name / "__init__.py").exists()] == []
