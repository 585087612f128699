"""What a scenario offers: one op at one size, and the implementations that compete for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..selection.costs import Cost

Args = tuple[Any, ...]
Prepare = Callable[[], Callable[..., Any]]
"""Gives an implementation, ready to be called with the arguments. Compiles where there is something to compile; raises
where the implementation is not available."""
Only = Mapping[str, Collection[str]]
"""Allowed values, as text, by column: `{"tokens": {"1", "8"}, "impl": {"ir"}}`. Columns that it lacks are free."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One op at one size.

    Attributes:
        op: name of the op.
        params: what sizes it, as columns of the table; numbers or names.
        make: builds one set of arguments in fresh memory. Sets of one seed are equal.
        written: positions of the arguments that the op mutates.
        cost: what any implementation must do; flops are those of matrix products, where these may be the limit.
        reference: the definition, which every implementation must agree with.
        implementations: how to get each, by name.
        published: times in microseconds that others have reached here, by name; shown for comparison.
        differs: as `gate.disagreement`, for results whose rounding is not defined to the bit.
        cold: whether a time with the data out of the cache is wanted.
        alike: how many of what `cost` counts one call does, one after the other; times and launches are those of one.
        split: whether the time of each of its kernels is worth keeping too.
        beside: what a call does that is not counted: its time, measured in the same way, is taken off.
        details: what else is worth keeping of an implementation that was timed on a GPU, found by further calls;
            launches are then left to it. Keys may be added until the scenario is over.
        clock: "" for graph replays on a GPU, "stream" for calls in a row, host time included: for what captures itself.
    """

    op: str
    params: Mapping[str, int | str]
    make: Callable[[int], Args]
    written: tuple[int, ...]
    cost: Cost
    reference: Callable[..., Any]
    implementations: Mapping[str, Prepare]
    published: Mapping[str, float]
    differs: Callable[..., str] | None = None
    cold: bool = True
    clock: str = ""
    alike: int = 1
    split: bool = False
    beside: Callable[[], Any] | None = None
    details: Callable[[Callable[[], Any]], dict[str, Any]] | None = None


def keep(only: Only, **columns: int | str) -> bool:
    """Whether a row with these columns is wanted."""
    return all(str(value) in only[name] for name, value in columns.items() if name in only)
