"""Parameter sets that `make test` runs of a test with several lists of parameters: those that cover every value.

Two lists of 8 and 5 values make 40 sets. 8 of them contain all 13 values; `make test-all` runs the other 32 too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

import pytest


def covering(sets: Sequence[tuple[Hashable, ...]]) -> list[bool]:
    """Return, for each set of parameters, whether it is kept: every value is in a set that is.

    Of a whole product the sets of its diagonal are kept; a value that has none keeps the first set that it is in.
    """
    values = [list(dict.fromkeys(column)) for column in zip(*sets, strict=True)]
    diagonal = {tuple(column[i % len(column)] for column in values) for i in range(max(map(len, values)))}
    keep = [parameters in diagonal for parameters in sets]
    for number, column in enumerate(values):
        for value in column:
            having = [i for i, parameters in enumerate(sets) if parameters[number] == value]
            if not any(keep[i] for i in having):
                keep[having[0]] = True
    return keep


def parameters_by_list(item: pytest.Item) -> tuple[Hashable, ...]:
    """Return the parameters of a test, a tuple for each decorator and each fixture that it has them from."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return ()
    key_by_name = {name: _key(value) for name, value in item.callspec.params.items()}
    lists: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        if values := tuple(key_by_name.pop(name) for name in names if name in key_by_name):
            lists.append(values)
    return (*lists, *(key_by_name[name] for name in sorted(key_by_name)))


def _key(value: object) -> Hashable:
    return (type(value), value) if isinstance(value, (str, int, float, type(None))) else id(value)


def not_needed(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests without which every value of each list of parameters is still tested."""
    for _, tests in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        group = list(tests)
        sets = [parameters_by_list(item) for item in group]
        if len(sets[0]) > 1:
            yield from (item for item, keep in zip(group, covering(sets), strict=True) if not keep)
