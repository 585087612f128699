"""Words of the house in docstrings, comments, messages and pages, and how docstrings begin."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRIVATE = {
    r"processors?(?!\()": "SM",
    r"copy engines?": "TMA copy",
    r"matrix units?": "tensor core",
    r"strips": "K-block",
    r"inbox(es)?(?!\[|; )": "cluster mailbox",
    r"letters?": "message",
    r"early start": "weight prefetch, PDL",
    r"cut into": "split",
    r"at hand": "warm",
    r"(calls|replays|launches) in a row": "consecutive",
    r"behind": "after",
    r"in front( of)?": "before",
    r"tak(e|es|en) over|took over": "fuse",
    r"merg(e|es|ed|ing) (in|with) (what is around|its neighbours?)|merg(e|es|ed|ing) ops|ops .{0,20}\bmerged": "fuse",
    r"refus(e|es|ed|ing|als?)": "is unsupported because",
    r"objections?": "is unsupported because",
    r"left apart|keeps? apart": "not fused",
    r"(is|are|was|were) brought": "copied",
    r"matrix products?|grouped products?": "GEMM, matmul",
    r"stroke": "cold",
}
"""Private words as patterns, and the word of the field that each stands for."""
TABLE_OF_WORDS = "CONTRIBUTING.md"
"""The page with the table of the private words themselves."""
FIRST_WORDS = ("Of", "As", "What", "Those", "The same", "See")
"""Beginnings of a docstring that lean on a neighbour or say nothing."""
UNFINISHED = (
    "dsv4_compile/reference/linear/",
    "dsv4_compile/reference/metadata/",
    "dsv4_compile/ops/linear/",
    "dsv4_compile/ops/metadata/",
    "dsv4_compile/selection/",
    "dsv4_compile/testing/",
    "lowering/linear/",
)
"""Folders with prose that is not yet in these words."""
WORD = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in PRIVATE), re.IGNORECASE)


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of comments and of strings with a space, which are docstrings, messages and labels."""
    if path.endswith(".md"):
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            yield from enumerate(token.string.splitlines(), token.start[0])


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings of modules, classes and functions, and of strings below constants."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        for statement in body:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def private_words(path: str, text: str) -> list[str]:
    """Return each private word of a file with its place."""
    return [f"{path}:{number} {match[0]!r}" for number, line in prose(path, text) for match in WORD.finditer(line)]


def test_prose_has_the_words_of_the_field(sources: dict[str, str], root: Path) -> None:
    pages = [root / "README.md", root / "CHANGELOG.md", root / "kernels" / "README.md"]
    pages += sorted((root / "dsv4_compile" / "docs").rglob("*.md"))
    texts = {path: text for path, text in sources.items() if not path.startswith(UNFINISHED)}
    texts |= {str(page.relative_to(root)): page.read_text() for page in pages}
    texts |= {str(path.relative_to(root)): path.read_text() for path in sorted((root / "examples").rglob("*.py"))}
    assert [hit for path, text in texts.items() for hit in private_words(path, text)] == []


def test_every_private_word_of_the_table_is_found(root: Path) -> None:
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (root / TABLE_OF_WORDS).read_text(), re.MULTILINE)
    words = [
        word.strip(' "')
        for write, not_ in table
        if write.startswith(("SM", "TMA", "tensor"))
        for word in not_.split(",")
    ]
    assert len(words) >= 4
    assert [word for word in words if not WORD.search(word)] == []
    for word in ("inbox", "letter", "early start", "refuses", "objection", "in front", "behind", "at hand"):
        assert private_words("a.py", f'"""A kernel {word} another."""\n') == [f"a.py:1 {word!r}"]
        assert private_words("a.py", f"x = 1  # {word}\n") and private_words("a.md", f"It is {word}.")
    assert private_words("a.py", "behind = 1\n") == []


def test_docstrings_begin_with_a_verb_or_a_noun(trees: dict[str, ast.Module]) -> None:
    leaning = [
        f"{path}:{number} {text.split()[:3]}"
        for path, tree in trees.items()
        if not path.startswith(UNFINISHED)
        for number, text in docstrings(tree)
        if any(re.match(rf"\s*{word}\b", text) for word in FIRST_WORDS)
    ]
    assert leaning == []


def test_docstrings_of_constants_and_functions_are_both_read() -> None:
    tree = ast.parse('"""a"""\nX = 1\n"""b"""\nclass C:\n    """c"""\n    def f(self):\n        """d"""\n')
    assert [text for _, text in docstrings(tree)] == ["a", "b", "c", "d"]
