"""Count the words and names that make prose and code hard to read: `python tests/tools/prose.py [PATH ...]`.

Rates of phrases are per 10,000 words of docstrings and comments, rates of names per 1,000 assigned names. test_prose.py
keeps package and tests at `CEILINGS`; the goal is `LIMITS`. The tool prints rates, ceilings and limits; with
paths, every hit in them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES: Mapping[str, tuple[str, ...]] = {
    "package": ("dsv4_compile", "kernels", "lowering"),
    "tests": ("tests", "examples"),
}
_BEFORE_WHAT = [
    "of",
    "for",
    "is",
    "are",
    "was",
    "as",
    "to",
    "by",
    "with",
    "from",
    "in",
    "on",
    "and",
    "than",
    "after",
    "before",
    "at",
    "about",
    "under",
    "between",
    "into",
    "not",
]
PHRASES: Mapping[str, str] = {
    "of what": rf"\b(?:{'|'.join(_BEFORE_WHAT)}) what\b",
    "in which": r"\b(?:in|of|on|at|by|for|to|with|from) which\b|\bwhose\b",
    "another": r"\banother\b",
    "of its own": r"\bof (?:its|their|his|her|my|our|your) own\b",
    "beside": r"\bbesides?\b",
}
NAMES = frozenset({"found", "each", "own", "place", "part", "made", "kept", "whole", "given"})
LIMITS: Mapping[str, float] = {
    "of what": 2.2,
    "in which": 16,
    "another": 2.6,
    "of its own": 0.2,
    "beside": 0.2,
    "names": 10,
}
"""The goal: twice the rates of helion."""
CEILINGS: Mapping[str, Mapping[str, float]] = {
    "package": {"of what": 1.5, "in which": 11, "another": 1.5, "of its own": 0.2, "beside": 0.2, "names": 8},
    "tests": {"of what": 1, "in which": 4, "another": 1, "of its own": 0.2, "beside": 0.2, "names": 5},
}
"""Rates by tree, rounded up. Lower them when rates fall; never raise them."""


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of every comment of a Python source; lines below each other are one."""
    blocks: list[tuple[int, int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ():
        if token.type == tokenize.COMMENT:
            (line, column), content = token.start, token.string.lstrip("#! ")
            if blocks and (line, column) == (blocks[-1][0] + len(blocks[-1][2]), blocks[-1][1]):
                blocks[-1][2].append(content)
            else:
                blocks.append((line, column, [content]))
    yield from ((line, " ".join(lines)) for line, _, lines in blocks)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, those below constants and fields included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def assigned(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every assigned variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def files(tree: str, root: Path = ROOT) -> list[Path]:
    """Return the Python files of one of `TREES`."""
    return sorted(path for folder in TREES[tree] for path in (root / folder).rglob("*.py"))


def rates(paths: Iterable[Path]) -> dict[str, float]:
    """Return the rate of each of `PHRASES`, and of `NAMES` as "names"."""
    words, phrases, names, bad = 0, Counter[str](), 0, 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for _, passage in (*comments(text), *docstrings(tree)):
            words += len(re.findall(r"[A-Za-z']+", passage))
            flat = " ".join(passage.split())
            phrases.update({name: len(re.findall(pattern, flat, re.IGNORECASE)) for name, pattern in PHRASES.items()})
        for _, name in assigned(tree):
            names += 1
            bad += name.strip("_") in NAMES
    return {name: 1e4 * phrases[name] / max(words, 1) for name in PHRASES} | {"names": 1e3 * bad / max(names, 1)}


def hits(path: Path) -> Iterator[str]:
    """Yield a line for each phrase and name of a file that is counted."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, passage in (*comments(text), *docstrings(tree)):
        flat = " ".join(passage.split())
        for name, pattern in PHRASES.items():
            for match in re.finditer(pattern, flat, re.IGNORECASE):
                yield f"{shown}:{line}: {name}: ...{flat[max(0, match.start() - 40) : match.end() + 30]}..."
    for line, name in assigned(tree):
        if name.strip("_") in NAMES:
            yield f"{shown}:{line}: name {name}"


def main(argv: list[str]) -> int:
    """Print rates, ceilings and limits, or every hit in paths; return 1 if a rate is above its ceiling."""
    if argv:
        paths = [path for name in argv for path in ([Path(name)] if name.endswith(".py") else Path(name).rglob("*.py"))]
        lines = [line for path in sorted(paths) for line in hits(path.resolve())]
        sys.stdout.write("\n".join([*lines, f"{len(lines)} in {len(paths)} files"]) + "\n")
        return 0
    exceeded = False
    for tree in TREES:
        for name, rate in rates(files(tree)).items():
            ceiling = CEILINGS[tree][name]
            exceeded |= rate > ceiling
            sys.stdout.write(f"{tree:8} {name:12} {rate:6.2f}  at most {ceiling:g}, goal {LIMITS[name]:g}\n")
    return int(exceeded)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
