"""Not a test: comparisons of calls with eager transformers, which computes the rows of many calls in one batch.

It recomputes every row from its tokens, without a cache and without a mask: no token sees later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHORT = 48
"""Most tokens of a row that is computed beside short ones, not beside long ones."""


class Expected(NamedTuple):
    """A comparison with the logits `[count, vocab]` that eager transformers has for the last of `tokens[:end]`."""

    call: int
    tokens: list[int]
    end: int
    count: int
    compare: Callable[[Tensor], None]


class Eager:
    """The original model, and the comparisons with it that have not been made yet."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.expected: list[Expected] = []

    def expect(self, call: int, tokens: list[int], count: int, compare: Callable[[Tensor], None]) -> None:
        """Let `settle` compare the logits after the last `count` of the tokens that a row has now."""
        self.expected.append(Expected(call, tokens, len(tokens), count, compare))

    def expect_greedy(self, call: int, tokens: list[int], count: int) -> None:
        """Let `settle` find that the last `count` of `tokens` have each the largest logit after those before it."""
        chosen = torch.tensor(tokens[-count:])[:, None]

        def compare(logits: Tensor) -> None:
            assert (logits.amax(1) - logits.gather(1, chosen)[:, 0] < 2e-4).all()

        self.expect(call, tokens[:-1], count, compare)

    @torch.no_grad()
    def settle(self) -> None:
        """Compare all calls since the last time with eager transformers, with rows of all of them in one batch."""
        rows = {id(each.tokens): each.tokens[: each.end] for each in self.expected}  # the longest of each
        for short in (True, False):
            some = {key: row for key, row in rows.items() if row and (len(row) <= SHORT) == short}
            if not some:
                continue
            width = max(map(len, some.values()))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in some.values()])
            logits = self.original(ids, use_cache=False).logits
            places = {key: place for place, key in enumerate(some)}
            for each in self.expected:
                if id(each.tokens) in places:
                    try:
                        each.compare(logits[places[id(each.tokens)], each.end - each.count : each.end])
                    except AssertionError as fault:
                        raise AssertionError(f"call {each.call}: {fault}") from fault
        self.expected.clear()
