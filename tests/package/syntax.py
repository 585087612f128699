"""Not a test: nodes of parsed files, which many rules look through."""

from __future__ import annotations

import ast
import functools


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a file in the order of ast.walk, which takes a second for the whole package."""
    return tuple(ast.walk(tree))
