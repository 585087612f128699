"""The house rule `<tree>/<family>/<op>.py`: no import circle, a small reach, no signature typed many times."""

from __future__ import annotations

import ast
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_compile import ops
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import LOWERED, OPS
from dsv4_compile.ops.common.kernels import KERNELS

FAMILIES = sorted(info.name for info in pkgutil.iter_modules(ops.__path__) if info.name != "common")
SHARED = {
    "kernels": {"host", "device", "hopper"},
    "lowering": {"ir"},
    "ops": {"common"},
    "cpu": {"common", "native"},
    "reference": {"common"},
}
"""Folders of a tree that belong to no family."""
MOST_REACHED = 12
"""Files of the op's family that its kernels may import, directly or not."""
WIDE = 10
"""Arguments that make an op wide."""
MOST_COPIES = 3
"""Places that may spell out the arguments of a wide op, in addition to its schema."""


def home(op: str) -> str:
    """Name of the file that holds an op: the shortest op name that it is or continues with an underscore."""
    return min((name for name in OPS if op == name or op.startswith(f"{name}_")), key=len)


def family(op: str, root: Path) -> str:
    """Family of an op, by where its definition lies."""
    families = [name for name in FAMILIES if (root / "dsv4_compile" / "reference" / name / f"{home(op)}.py").exists()]
    assert len(families) == 1, f"{op}: reference/<family>/{home(op)}.py exists in {families or 'no family'}"
    return families[0]


def reached(op: str, imports: dict[str, set[str]], root: Path) -> set[str]:
    """Kernel files of an op's own family that its entry file imports, directly or not, with itself."""
    room = f"kernels/{family(op, root)}/"
    files, waiting = set[str](), [f"{room}{home(op)}.py"]
    while waiting:
        path = waiting.pop()
        if path not in files and path.startswith(room):
            files.add(path)
            waiting += imports[path]
    return files


@pytest.fixture(scope="module")
def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Every source file with the source files that it imports when it is loaded or inside a function."""
    modules = {_module(path): path for path in trees}
    return {path: {modules[m] for m in _imported(path, tree) if m in modules} - {path} for path, tree in trees.items()}


def _module(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    dotted = ".".join(parts if parts[0] == "dsv4_compile" else ("dsv4_compile", *parts))
    return dotted.removesuffix(".__init__")


def _imported(path: str, tree: ast.Module) -> Iterator[str]:
    package = _module(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield stem
            yield from (f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_folders_of_a_tree_are_families_and_what_they_share(root: Path) -> None:
    for tree, shared in SHARED.items():
        folder = root / tree if (root / tree).is_dir() else root / "dsv4_compile" / tree
        folders = {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
        assert folders - shared <= set(FAMILIES), tree
    entries = {path.name for path in (root / "kernels").iterdir()} - {"__pycache__"}
    assert entries <= {*FAMILIES, *SHARED["kernels"], "README.md"}, "a file that lies in no family"


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_op_lies_in_one_file_of_its_name_in_every_tree(op: str, root: Path, imports: dict[str, set[str]]) -> None:
    stem, room = home(op), family(op, root)
    registry.load()
    assert (root / "dsv4_compile" / "ops" / room / f"{stem}.py").exists()
    assert list((root / "tests" / "ops" / room).glob(f"test_{stem}*.py"))
    if op in KERNELS:
        assert KERNELS[op] == f"dsv4_compile.kernels.{room}.{stem}"
        assert (root / "kernels" / room / f"{stem}.py").exists()
        # GEMMs are tested in files of the kernels that several launchers share.
        tested = [Path(path).stem for path in reached(op, imports, root)]
        assert any(list((root / "tests" / "kernels" / room).glob(f"test_{name}*.py")) for name in tested)
        assert list((root / "tests" / "gpu" / room).glob(f"test_{stem}*.py"))
    assert (op in LOWERED) == (op in registry.LOWERINGS)
    if isinstance(LOWERED.get(op), str):
        assert LOWERED[op] == f"dsv4_compile.lowering.{room}.{stem}"
        assert list((root / "tests" / "lowering" / room).glob(f"test_{stem}*.py"))


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_an_op_reaches_few_files_of_its_family(op: str, imports: dict[str, set[str]], root: Path) -> None:
    files = reached(op, imports, root)
    assert len(files) <= MOST_REACHED, sorted(files)


def test_no_imports_go_in_a_circle(imports: dict[str, set[str]]) -> None:
    # A package's __init__ imports its modules, which may import other modules of the package: no circle of files.
    files = {path: {p for p in imported if not p.endswith("__init__.py")} for path, imported in imports.items()}
    files = {path: imported for path, imported in files.items() if not path.endswith("__init__.py")}
    while leaves := [path for path, imported in files.items() if not imported]:
        for leaf in leaves:
            del files[leaf]
        files = {path: imported - set(leaves) for path, imported in files.items()}
    assert sorted(files) == []


@pytest.fixture(scope="module")
def spelled(trees: dict[str, ast.Module]) -> list[tuple[str, list[str]]]:
    """Files, and the parameters or fields of each function and class in them."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [(path, _names(node)) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("op", sorted(op for op in OPS if len(OPS[op]._schema.arguments) >= WIDE))
def test_a_wide_signature_is_spelled_out_in_few_places(op: str, spelled: list[tuple[str, list[str]]]) -> None:
    names = [argument.name for argument in OPS[op]._schema.arguments]
    places = Counter(path for path, arguments in spelled if arguments[: len(names)] == names)
    assert sum(places.values()) <= MOST_COPIES, places


def _names(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Parameters of a function, or fields of a class."""
    if isinstance(node, ast.FunctionDef):
        return [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    return [
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
