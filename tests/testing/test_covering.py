"""Samples of cases have every value of each parameter, and are samples of themselves."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.covering import covering, values_of

WORDS, PAIRS = ["a", "b", "c", "d"], [(1, "x"), (2, "y"), (3, "x")]


class Case(SimpleNamespace):
    """An item of pytest, as far as a sample asks."""

    __hash__ = object.__hash__


def case(word: str, pair: tuple[int, str]) -> Any:
    """Return a case of `parametrize("word", WORDS)` and `parametrize(("number", "letter"), PAIRS)`."""
    marks = [pytest.mark.parametrize("word", WORDS).mark, pytest.mark.parametrize(("number", "letter"), PAIRS).mark]
    params = {"word": word, "number": pair[0], "letter": pair[1]}
    return Case(
        nodeid=f"test[{word}-{pair}]", callspec=SimpleNamespace(params=params), iter_markers=lambda name: iter(marks)
    )


def test_a_sample_has_every_value_of_each_decorator_and_not_every_combination() -> None:
    cases = [case(word, pair) for word, pair in itertools.product(WORDS, PAIRS)]
    kept = covering(cases)
    assert {item.callspec.params["word"] for item in kept} == set(WORDS)
    assert {(item.callspec.params["number"], item.callspec.params["letter"]) for item in kept} == set(PAIRS)
    assert len(WORDS) <= len(kept) < len(cases)
    assert covering(kept) == kept == covering(reversed(cases))


def test_arguments_of_one_decorator_are_one_value() -> None:
    assert len(values_of(case("a", PAIRS[0]))) == 2


def test_a_test_without_parameters_is_kept() -> None:
    item = Case(nodeid="test", iter_markers=lambda name: iter(()))
    assert covering([item]) == {item}
