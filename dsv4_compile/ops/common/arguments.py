"""Argument tuples of wide ops: one NamedTuple in `reference/` stands for a signature everywhere below the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARGUMENTS: dict[str, type[Any]] = {}
"""NamedTuple class of each op that has one; its fields and defaults are those of the op's schema."""


def packed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which takes the argument tuple of `op`, as one that takes the op's arguments.

    Keyword arguments that the schema does not name, such as the tiling of a launcher, are passed on. A function of an
    op without an argument tuple is returned unchanged.
    """
    arguments = ARGUMENTS.get(op)
    if arguments is None:
        return function
    fields = frozenset(arguments._fields)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return function(arguments(*args))
        fields_given = {name: kwargs.pop(name) for name in [*kwargs] if name in fields}
        return function(arguments(*args, **fields_given), **kwargs)

    return run
