"""Argument tuples of wide ops: one NamedTuple in `reference/` stands for a signature everywhere below the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

ARGUMENTS: dict[str, type[Any]] = {}
"""NamedTuple class of each op that has one; its fields and defaults are those of the op's schema."""

LISTS = (list, tuple)
"""Types of a list of tensors or numbers among the arguments of an op."""


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an op, those in lists included."""
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, LISTS):
            yield from (x for x in value if isinstance(x, Tensor))


def map_tensors(function: Callable[[Tensor], Any], arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments of an op with `function` of each tensor in its place, those in lists included."""

    def mapped(value: Any) -> Any:
        return function(value) if isinstance(value, Tensor) else value

    return tuple([mapped(x) for x in value] if isinstance(value, LISTS) else mapped(value) for value in arguments)


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
