"""Sample of the cases of a test: every value of each parameter at least once, instead of every combination."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest


def values_of(item: pytest.Item) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return the values that a case has, one for each `parametrize` or parameter of a fixture, by identity."""
    params: dict[str, object] = item.callspec.params if hasattr(item, "callspec") else {}
    together = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        together |= {name.strip(): names for name in names.split(",")}
    values = defaultdict(list)
    for name in sorted(params):
        values[together.get(name, name)].append(id(params[name]))
    return frozenset((names, tuple(value)) for names, value in values.items())


def covering(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return cases that together have every value of `items`, the cases of one test.

    Cases are taken in an order that only their names decide. A sample of the sample is the same sample, so a process
    that is handed its cases by name keeps them all.
    """
    seen, kept = set[tuple[str, tuple[int, ...]]](), set[pytest.Item]()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        values = values_of(item)
        if not values or not values <= seen:
            seen |= values
            kept.add(item)
    return kept
