"""Not a test: comparisons of calls with eager transformers, which computes the rows of many calls in one batch.

It recomputes every row from its tokens, without a cache and without a mask: no token sees later ones. A row is compared
up to the first token that has a tie of two experts, of which rounding chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SHORT = 48
"""Most tokens of a row that is batched with short rows, not with long ones."""
TIE = 1e-5
"""Difference of two experts' scores below which rounding may choose either."""


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
            out = self.original(ids, use_cache=False, output_router_logits=True)
            clear = self.chosen_clearly(out.router_logits).view_as(ids).cumprod(1).bool()
            places = {key: place for place, key in enumerate(some)}
            for each in self.expected:
                place = places.get(id(each.tokens))
                if place is not None and clear[place, each.end - 1]:
                    try:
                        each.compare(out.logits[place, each.end - each.count : each.end])
                    except AssertionError as fault:
                        raise AssertionError(f"call {each.call}: {fault}") from fault
        self.expected.clear()

    def chosen_clearly(self, router_logits: Sequence[Tensor]) -> Tensor:
        """Return which tokens have no tie between an expert that is chosen and one that is not, int64 `[tokens]`."""
        routers = [module for module in self.original.modules() if hasattr(module, "e_score_correction_bias")]
        chosen, gaps = self.original.config.num_experts_per_tok, []
        for logits, router in zip(router_logits, routers, strict=True):
            scores = functional.softplus(logits.float()).sqrt() + router.e_score_correction_bias
            ranked = scores.sort(dim=-1, descending=True).values
            gaps.append(ranked[:, chosen - 1] - ranked[:, chosen])
        return (torch.stack(gaps).amin(0) >= TIE).long()
