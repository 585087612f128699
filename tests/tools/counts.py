"""Print counts of names, words, lines and signatures: `python tests/tools/counts.py [ROOT]`, of any checkout.

Rates of words and names, lines, the size of the README, parameters of the decode kernels, and for each op the files
that it has and the lists that it stands in.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.tools import prose  # noqa: E402

LIST_OF_OPS = 10
"""Ops that a collection or a file's imports name at least, to count as a list of ops."""
DECODE = Path("kernels/attention")


class OpList(NamedTuple):
    """A collection, or the imports of a file, that names many ops."""

    path: str
    line: int
    ops: frozenset[str]


def python_files(root: Path) -> list[Path]:
    """Return the Python files of package and tests."""
    return [path for tree in prose.TREES for path in prose.files(tree, root)]


def ops(root: Path) -> dict[str, str]:
    """Return "family/stem" of every op by name: the names, or constants, that `define` is called with in ops/."""
    homes = {}
    for path in sorted((root / "dsv4_compile" / "ops").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        constants = dict(re.findall(r'(?m)^(\w+) = "(\w+)"$', text))
        names = [constants.get(name, name) for name in re.findall(r'(?m)^\w+ = define\(\s*"?(\w+)', text)]
        homes |= dict.fromkeys(names, f"{path.parent.name}/{path.stem}")
    return homes


def op_files(root: Path, home: str) -> list[str]:
    """Return the files of the ops at `home` ("family/stem") in all trees, tests and samples included."""
    family, stem = home.split("/")
    names = [f"{family}/{stem}.py", f"{family}/test_{stem}*.py", f"{family}/test_lowered_{stem}*.py"]
    trees = ("dsv4_compile/reference", "dsv4_compile/ops", "dsv4_compile/cpu", "lowering", "kernels")
    trees += tuple(f"tests/{tree}" for tree in ("ops", "lowering", "kernels", "gpu"))
    paths = {path for tree in trees for name in names for path in (root / tree).glob(name)}
    paths |= set((root / "dsv4_compile" / "testing").glob(f"_samples_{stem}.py"))
    return sorted(str(path.relative_to(root)) for path in paths)


def _named(node: ast.AST) -> Iterator[str]:
    """Yield the last parts of the names in a collection: keys of a dict, elements of the others."""
    if isinstance(node, ast.Dict):
        elements = [key for key in node.keys if key is not None]
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        elements = node.elts
    else:
        return
    for element in elements:
        if isinstance(element, ast.Constant) and isinstance(element.value, str):
            yield element.value.rpartition(".")[2]
        elif isinstance(element, ast.Tuple):
            yield from _named(element)


@functools.cache
def op_lists(root: Path) -> list[OpList]:
    """Return every list of ops in package and tests."""
    known, lists = set(ops(root)), []
    for path in python_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        sets = [(1, imported & known), *((getattr(n, "lineno", 0), set(_named(n)) & known) for n in ast.walk(tree))]
        shown = str(path.relative_to(root))
        lists += [OpList(shown, line, frozenset(names)) for line, names in sets if len(names) >= LIST_OF_OPS]
    return lists


def decode_parameters(root: Path) -> dict[str, int]:
    """Return the number of parameters of each decode kernel that is launched, by name."""
    counts = {}
    for path in sorted((root / DECODE).glob("sparse_mla_decode_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("_kernel"):
                counts[f"{path.stem}: {node.name}"] = sum(isinstance(child, ast.arg) for child in ast.walk(node.args))
    return counts


def lines(root: Path, tree: str) -> tuple[int, int]:
    """Return the lines of a tree of `prose.TREES`, and those of them that are neither blank nor a comment."""
    texts = [path.read_text(encoding="utf-8").splitlines() for path in prose.files(tree, root)]
    every = [line.strip() for text in texts for line in text]
    return len(every), sum(bool(line) and not line.startswith("#") for line in every)


def report(root: Path) -> Iterator[str]:
    """Yield the lines of the report on a checkout."""
    for tree in prose.TREES:
        for name, rate in prose.rates(prose.files(tree, root)).items():
            yield f"{tree:8} {name:12} {rate:6.2f}  goal {prose.LIMITS[name]:g}"
        total, code = lines(root, tree)
        yield f"{tree:8} lines        {total}  of code {code}"
    yield f"README       {len((root / 'README.md').read_bytes())} bytes"
    for kernel, count in decode_parameters(root).items():
        yield f"parameters   {count:3}  {kernel}"
    lists, homes = op_lists(root), ops(root)
    for op, home in sorted(homes.items()):
        stands_in = sum(op in one.ops for one in lists)
        yield f"op           {len(op_files(root, home)):2} files, {stands_in} lists  {op}"
    for one in lists:
        yield f"list of ops  {len(one.ops):2} ops  {one.path}:{one.line}"


def main(argv: list[str]) -> int:
    """Print the report."""
    sys.stdout.write("\n".join(report(Path(argv[0]).resolve() if argv else ROOT)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
