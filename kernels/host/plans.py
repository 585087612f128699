"""Plans: what launchers decide, as pure functions of sizes and the GPU.

A launcher with a plan has two more functions:

- `problem_of(call)` returns the sizes and formats of a call, its tokens apart.
- `plan(problem, tokens, gpu)` returns a NamedTuple: grids, tiles, options, and which launches there are.

The launcher allocates and launches what the plan says. A plan holds no tensor, reads nothing but its arguments, and is
printed by `print`. Its `variant` is what its kernels are compiled for: calls of one problem with equal variants run the
same compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol


class Plan(Protocol):
    """Decisions of a launcher for a call."""

    @property
    def variant(self) -> Hashable:
        """The constants and options that kernels are compiled for: the plan without its grids."""


def variants(plan: Callable[[int], Plan], tokens: Iterable[int]) -> dict[Hashable, int]:
    """Return every variant that calls of `tokens` tokens need, each with the first of `tokens` that needs it.

    `plan` is a function of the number of tokens: `lambda tokens: module.plan(problem, tokens, gpu)`.
    """
    first: dict[Hashable, int] = {}
    for count in tokens:
        first.setdefault(plan(count).variant, count)
    return first
