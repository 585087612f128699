"""The lowering of `mhc_pre` in C++: one graph for any number of tokens, and declined calls."""

from __future__ import annotations

from tests.lowering.hyper_connections.compiled import (
    assert_a_declined_call_says_why,
    assert_is_few_loops_and_equals_eager,
)


def test_the_compiled_op_is_few_loops_and_equals_eager() -> None:
    assert_is_few_loops_and_equals_eager("mhc_pre", 2)


def test_a_declined_call_says_why() -> None:
    assert_a_declined_call_says_why("mhc_pre", "streams")
