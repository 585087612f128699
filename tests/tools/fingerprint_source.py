"""Not a test: hash all that a kernel is compiled from."""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from types import ModuleType
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from tests.support.fake_triton import triton_driver

DIGITS = 16
OURS = ("dsv4_compile", "tests.")
"""Prefixes of modules with sources that count."""


def digest(*parts: Any) -> str:
    """Return the first DIGITS hexadecimal digits of a hash of `parts`."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:DIGITS]


@functools.cache
def _own_text(value: Any) -> tuple[str, list[str]]:
    """Return the text of a function or class without comments and docstrings, and the names in it."""
    lines = getattr(value, "raw_src", None)  # Triton has read the source of its functions
    text = "".join(lines) if isinstance(lines, list) else inspect.getsource(getattr(value, "fn", value))
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree), sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})


class _Known(NamedTuple):
    """A hash of sources, and their globals at that time: scope, name and value."""

    source: str
    named: list[tuple[dict[str, Any], str, Any]]


_KNOWN: dict[Any, _Known] = {}


def source_of(function: Any) -> str:
    """Return a hash of the source of a function, of Triton or Python, and of all that it names now.

    Comments and docstrings do not count.
    """
    known = _KNOWN.get(function)
    if known is None or any(scope.get(name) is not value for scope, name, value in known.named):
        known = _KNOWN[function] = _read(function)
    return known.source


def _read(function: Any) -> _Known:
    seen, waiting, words, named = set[int](), [("", function)], list[str](), list[tuple[dict[str, Any], str, Any]]()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen or name in vars(builtins):
            continue
        seen.add(id(value))
        if isinstance(value, ModuleType) and value.__name__.startswith(OURS):
            words.append(f"{name} {inspect.getsource(value)}")
            continue
        python = getattr(value, "fn", value)
        has_source = inspect.isfunction(python) or inspect.isclass(python) or hasattr(python, "__wrapped__")
        if not has_source or not (python.__module__ or "").startswith(OURS):
            # Of modules and functions of Triton, the version counts.
            words.append(f"{name} {re.sub(' at 0x[0-9a-f]+', '', str(getattr(value, '__name__', value)))}")
            continue
        text, names = _own_text(value)
        words.append(f"{name} {text}")
        scope = vars(sys.modules[python.__module__])
        captured = inspect.getclosurevars(python).nonlocals if inspect.isfunction(python) else {}
        named += [
            (scope, global_name, scope[global_name])
            for global_name in names
            if global_name in scope and global_name not in captured
        ]
        waiting += [
            (used, captured[used] if used in captured else scope[used])
            for used in names
            if used in scope or used in captured
        ]
    return _Known(digest(*sorted(words)), named)


@functools.cache
def _binder(function: Any, target: GPUTarget) -> Any:
    """Return what tells types and constants of a launch for the active `target`."""
    return function.create_binder()[-1]


def specialized(function: Any, values: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, str]:
    """Return the types and constants of a launch, and its options: Triton compiles for them."""
    bind = _binder(function, triton_driver.active.get_current_target())
    _, specialization, chosen = bind(*values, debug=False, instrumentation_mode="", **options)
    return str(specialization), str(sorted(chosen.items()))


def launch_digest(function: Any, values: tuple[Any, ...], options: dict[str, Any], *more: Any) -> str:
    """Return a hash of all that a launch for the active target is compiled from, and of `more`."""
    passed = [source_of(value) for value in (*values, *options.values()) if isinstance(value, JITFunction)]
    return digest(source_of(function), *passed, *specialized(function, values, options), *more)
