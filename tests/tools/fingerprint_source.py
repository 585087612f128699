"""Not a test: hash the sources that a kernel is compiled from."""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any

DIGITS = 16


def digest(*parts: Any) -> str:
    """Return the first DIGITS hexadecimal digits of a hash of `parts`."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:DIGITS]


@functools.cache
def source_of(function: Any) -> str:
    """Return a hash of the source of a Triton function and of all that it names, comments and docstrings aside."""
    seen, waiting, words = set[int](), [("", function)], list[str]()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen or name in vars(builtins):
            continue
        seen.add(id(value))
        if isinstance(value, ModuleType) and value.__name__.startswith("dsv4_compile"):
            words.append(f"{name} {inspect.getsource(value)}")
            continue
        python = getattr(value, "fn", value)
        if not getattr(python, "__module__", "").startswith("dsv4_compile") or not hasattr(python, "__name__"):
            # Of modules and functions of Triton, the version counts.
            words.append(f"{name} {getattr(value, '__name__', value)}")
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(python)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
        words.append(f"{name} {ast.unparse(tree)}")
        scope = dict(vars(sys.modules[python.__module__]))
        if inspect.isfunction(python):
            scope |= inspect.getclosurevars(python).nonlocals
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        waiting += [(each, scope[each]) for each in names if each in scope]
    return digest(*sorted(words))
