"""Tests of tests/covering.py: fewer sets of parameters, with every value."""

from __future__ import annotations

from itertools import product

import pytest

from tests.covering import covering, not_needed


@pytest.mark.parametrize("sizes", [(1, 1), (8, 5), (2, 2), (3, 4, 2), (2, 6, 4, 4)], ids=str)
def test_a_product_keeps_as_many_sets_as_its_longest_list_has_values(sizes: tuple[int, ...]) -> None:
    sets = list(product(*map(range, sizes)))
    covered = [parameters for parameters, keep in zip(sets, covering(sets), strict=True) if keep]
    assert len(covered) == max(sizes)
    assert [len(set(column)) for column in zip(*covered, strict=True)] == [*sizes]


def test_a_part_of_a_product_keeps_every_value() -> None:
    sets = [("a", 0), ("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    assert covering(sets) == [True, False, True, True, True]
    assert covering([("a", 0)]) == [True]


@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize(("two", "three"), [(2, 3), (2, 4), (3, 3)])
def test_values_of_one_decorator_stay_together(one: int, two: int, three: int, request: pytest.FixtureRequest) -> None:
    name = request.node.originalname
    items = [item for item in request.session.items if item.nodeid.partition("[")[0].endswith(f"::{name}")]
    covered = {item.nodeid.rpartition("[")[2] for item in items} - {
        item.nodeid.rpartition("[")[2] for item in not_needed(items)
    }
    assert covered == {"2-3-0]", "2-4-1]", "3-3-0]"}
    assert request.node.nodeid.rpartition("[")[2] == f"{two}-{three}-{one}]"
