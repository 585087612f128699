"""Rules of CONTRIBUTING that a machine can check: sizes, import arrows, where numbers and private APIs may appear."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.package.syntax import nodes

MAX_LINES, MAX_KERNEL_LINES = 400, 700
"""Of a file, and of a kernel together with its launcher."""

MANY_PARAMETERS, MOST_WITH_MANY = 10, 0.05
"""Parameters that are many, and the largest share of the functions of kernels/ that may have as many."""

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_files", "columns", "errors", "progress"}),
    frozenset({"_compat", "sizes"}),
    frozenset({"layout", "sources"}),
    frozenset({"selection"}),
    frozenset({"checkpoints", "config", "rope_tables"}),
    frozenset({"reference"}),
    frozenset({"cpu"}),
    frozenset({"ops"}),
    frozenset({"metadata", "cache", "parallel"}),
    frozenset({"options"}),
    frozenset({"kernels", "lowering"}),
    frozenset({"loading", "attention_backends"}),
    frozenset({"modules"}),
    frozenset({"runtime"}),
    frozenset({"backend", "passes"}),
    frozenset({"hf", "models", "debug", "testing", "bench"}),
    frozenset({"integrations"}),
    frozenset({"doctor"}),
    frozenset({"cli", "__init__"}),
    frozenset({"__main__"}),
)
"""Bottom first. A module imports from its own layer and from those before it. `__init__` is the package's face."""

RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

LAYOUT_NUMBERS = {584, 576, 448, 37440, 36864, 8640, 4608, 1728, 1152}
"""Row, page and tile sizes that mean nothing else."""
COMMON_NUMBERS = {512, 132, 128, 68}
"""Sizes that are layout in these units, and may be a tile of a kernel or a model's dimension in others."""
LAYOUT_UNITS = {"reference", "ops", "metadata", "cache", "modules", "loading"}


def _unit(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return parts[1] if parts[0] == "dsv4_compile" else parts[0]


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and unit of everything of ours that a file imports, imports inside functions included."""
    here = Path(path).with_suffix("").parts
    package = list(here[:-1]) if here[0] == "dsv4_compile" else ["dsv4_compile", *here[:-1]]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] == "dsv4_compile":
                unit = parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"
                yield node.lineno, unit


def test_every_module_has_a_layer(trees: dict[str, ast.Module]) -> None:
    assert {_unit(path) for path in trees} - set(RANK) == set()


def test_imports_point_downwards_only(trees: dict[str, ast.Module]) -> None:
    upward = []
    for path, tree in trees.items():
        for line, unit in _imports(path, tree):
            # `from . import __version__` asks the face for a constant, which closes no cycle.
            if _unit(path) not in ("__init__", "__main__", "doctor", "bench") and RANK[unit] > RANK[_unit(path)]:
                upward.append(f"{path}:{line} imports {unit}")
    assert upward == []


@pytest.mark.parametrize("unit", ["errors", "layout", "reference", "ops", "metadata", "config", "cache"])
def test_lower_layers_import_torch_and_ourselves_alone(trees: dict[str, ast.Module], unit: str) -> None:
    foreign = []
    allowed = {"torch", "dsv4_compile", "__future__", "collections", "dataclasses", "functools", "typing", "math"}
    allowed |= {
        "json",
        "pathlib",
        "enum",
        "itertools",
        "contextlib",
        "warnings",
        "os",
        "importlib",
        "pkgutil",
        "sys",
        "inspect",
        "operator",
        "re",
    }
    for path, tree in trees.items():
        if _unit(path) != unit:
            continue
        for node in nodes(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            foreign += [f"{path}:{node.lineno} {name}" for name in names if name.split(".")[0] not in allowed]
    assert foreign == []


def test_no_file_is_longer_than_the_ceiling(sources: dict[str, str], root: Path) -> None:
    tests = {str(path.relative_to(root)): path.read_text() for path in (root / "tests").rglob("*.py")}
    lines = {path: text.count("\n") for path, text in {**sources, **tests}.items()}
    ceiling = {path: MAX_KERNEL_LINES if path.startswith("kernels/") else MAX_LINES for path in lines}
    assert {path: count for path, count in lines.items() if count > ceiling[path]} == {}


def test_cache_layout_numbers_appear_in_layout_alone(trees: dict[str, ast.Module]) -> None:
    uses = [
        f"{path}:{node.lineno} {node.value}"
        for path, tree in trees.items()
        if path != "dsv4_compile/layout.py"
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if node.value in LAYOUT_NUMBERS | (COMMON_NUMBERS if _unit(path) in LAYOUT_UNITS else set())
    ]
    assert uses == []


def _jitted(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions that Triton compiles."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
            yield node


def _texts(tree: ast.Module) -> Iterator[str]:
    """Fields that may be a string or None, of the named tuples of a file."""
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and re.search(r"\b(str|None)\b", ast.unparse(field.annotation)):
                    yield ast.unparse(field.target)


def _texts_passed(trees: dict[str, ast.Module]) -> list[str]:
    """Calls of Triton functions with a string that is a field of a constant."""
    compiled = {function.name for tree in trees.values() for function in _jitted(tree)}
    texts = {name for tree in trees.values() for name in _texts(tree)}
    passed = []
    for path, tree in trees.items():
        for function in _jitted(tree):
            arguments = function.args.args + function.args.kwonlyargs
            constants = {x.arg for x in arguments if x.annotation and "constexpr" in ast.unparse(x.annotation)}
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] not in compiled:
                    continue
                for value in (*call.args, *(keyword.value for keyword in call.keywords)):
                    base, *fields = ast.unparse(value).split(".")
                    if base in constants and fields and fields[-1] in texts:
                        passed.append(f"{path}:{value.lineno} {ast.unparse(value)}")
    return passed


def test_triton_functions_are_passed_strings_under_a_constant_name(trees: dict[str, ast.Module]) -> None:
    """Triton 3.6 compiles `FORMAT: tl.constexpr = SHAPE.fmt` and then `f(FORMAT)`, not `f(SHAPE.fmt)`."""
    assert _texts_passed({path: tree for path, tree in trees.items() if path.startswith("kernels/")}) == []


def test_few_functions_of_kernels_have_many_parameters(trees: dict[str, ast.Module]) -> None:
    """Parameters that belong together are one tuple or NamedTuple, where all versions of Triton give the same code."""
    counts = {
        f"{path}:{node.lineno} {node.name}": sum(isinstance(item, ast.arg) for item in ast.walk(node.args))
        for path, tree in trees.items()
        if path.startswith("kernels/")
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef)
    }
    many = {name: count for name, count in counts.items() if count >= MANY_PARAMETERS}
    assert len(many) <= MOST_WITH_MANY * len(counts), many


def test_kernels_launch_through_launch_kernel(trees: dict[str, ast.Module]) -> None:
    launchers = {"kernels/host/launch.py", "kernels/hopper/cluster_mailbox.py"}
    callers = {
        path
        for path, tree in trees.items()
        if path.startswith("kernels/")
        for node in nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    assert callers == launchers


def test_kernels_keep_no_tensor_between_calls_except_semaphores(trees: dict[str, ast.Module]) -> None:
    state = []
    for path, tree in trees.items():
        if not path.startswith("kernels/"):
            continue
        for node in nodes(tree):
            cached = isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(x) for x in node.decorator_list)
            if isinstance(node, ast.Global) or (cached and "Tensor" in ast.unparse(node.returns or node)):
                state.append(f"{path}:{node.lineno}")
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.Dict | ast.List) and not getattr(value, "keys", getattr(value, "elts", None))
            tensor = isinstance(value, ast.Call) and re.match(r"torch\.(?!iinfo|finfo)", ast.unparse(value.func))
            if empty or tensor:
                state.append(f"{path} {ast.unparse(node)}")
    assert state == ["kernels/host/semaphores.py _pools: dict[torch.device, _Pool] = {}"]


def _private(name: str) -> bool:
    return any(component.startswith("_") and not component.startswith("__") for component in name.split("."))


def _torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported from torch or reached through it."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", dotted):
                yield node.lineno, dotted


def test_private_torch_names_appear_in_compat_alone(trees: dict[str, ast.Module]) -> None:
    uses = {
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        if path != "dsv4_compile/_compat.py"
        for line, name in _torch_names(tree)
        if _private(name)
    }
    assert sorted(uses) == []


def test_library_never_prints_outside_the_command_line(trees: dict[str, ast.Module]) -> None:
    prints = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if path not in ("dsv4_compile/cli.py", "dsv4_compile/bench/command.py", "dsv4_compile/hf/demo.py")
        for node in nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def _reads_or_writes_text(call: ast.Call) -> bool:
    """Return whether a call opens a file or a pipe as text. `os.open` and `tensor.open` do not."""
    name = ast.unparse(call.func).split(".")[-1]
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "text" in named or "universal_newlines" in named or name in ("read_text", "write_text"):
        return True
    if name not in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") or ast.unparse(call.func) == "os.open":
        return False
    mode = named.get("mode") or next((ast.unparse(a) for a in call.args if isinstance(a, ast.Constant)), "'r'")
    binary = name.endswith("TemporaryFile") and "'w" not in mode
    return "b" not in mode and not binary


def test_text_has_an_encoding(trees: dict[str, ast.Module], root: Path) -> None:
    """Without one the locale decides, and the C locale takes ASCII alone."""
    examples = {str(path.relative_to(root)): path.read_text() for path in (root / "examples").rglob("*.py")}
    parsed = trees | {path: ast.parse(text) for path, text in examples.items()}
    calls = [
        f"{path}:{node.lineno} {ast.unparse(node)[:80]}"
        for path, tree in parsed.items()
        for node in nodes(tree)
        if isinstance(node, ast.Call) and _reads_or_writes_text(node)
        if not any(keyword.arg == "encoding" for keyword in node.keywords)
    ]
    assert calls == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("path.read_text()", True),
        ("subprocess.run(command, text=True)", True),
        ("open(path)", True),
        ("path.open('a')", True),
        ("tempfile.NamedTemporaryFile('w', suffix='.py')", True),
        ("file.open('rb')", False),
        ("os.open(path, os.O_RDWR)", False),
        ("tempfile.TemporaryFile()", False),
        ("path.read_bytes()", False),
    ],
)
def test_calls_that_read_or_write_text_are_seen(call: str, text: bool) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call) and _reads_or_writes_text(node) == text


def test_no_file_names_a_package_index_or_a_place_on_one_machine(root: Path) -> None:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    # Spelt in pieces, so that this file is not among those it finds.
    words = ("py" + "pi", "--index" + "-url", "--find" + "-links", "/" + "work/", "/" + "root/", "/" + "home/")
    forbidden = re.compile("|".join(words))
    matches = [
        f"{name}:{number}"
        for name in listed.stdout.split("\0")
        if (root / name).is_file()
        for number, line in enumerate((root / name).read_text(errors="replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert matches == []
