"""The choice of each request's next token from its logits: greedy, or sampled by its own temperature, top-k and top-p.

A sampled token is the inverse of the kept tokens' cumulative distribution at one uniform number, which the request
draws from its own seed. So it depends on nothing but the request, whichever others are in the batch: weights are
integers, 2**44 for the largest at 129,280 tokens, so their sums are exact.

Logits may be anything: every index is in range, and a row without a finite largest logit has no token, NO_TOKEN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...reference.drafts.distributions import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from ...reference.drafts.distributions import NO_TOKEN as NO_TOKEN
from ...reference.drafts.distributions import likeliest_tokens as likeliest_tokens
from ..model.arguments import integer, real

COLUMNS = 4
"""Numbers of a request that `choose_tokens` takes: temperature, top-k, top-p, uniform."""
_MOST_KEPT = 2**31
"""Top-k from which all tokens of any vocabulary are kept, exact as a float."""
_BITS = 62
"""Bits of a sum of weights: 44 of them are of one weight, at 129,280 tokens."""


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How a request samples, and its random numbers.

    Args:
        temperature: divides logits, a finite number; 0, and what is below `LEAST_TEMPERATURE`, chooses the largest.
        top_k: number of tokens to choose from; 0 = all. Of equal logits at its end the first tokens are kept.
        top_p: fewest tokens to choose from whose probabilities sum to it, at least one; 1 = all that have any. Of equal
            probabilities at its end the first tokens are kept.
        seed: seed of the request's random numbers, an integer from 0 on.

    Raises E201 for another type and for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _random: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seed = integer("seed", self.seed, 0)
        values = {
            "temperature": real("temperature", self.temperature, "from 0 on, 0 for greedy", lambda x: x >= 0),
            "top_k": integer("top_k", self.top_k, 0),
            "top_p": real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
            "seed": seed,
            "_random": random.Random(seed),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen."""
        return self.temperature < LEAST_TEMPERATURE

    def numbers(self) -> tuple[float, ...]:
        """Return temperature, top-k, top-p and 0, as `accept_drafts` takes them."""
        if self.greedy:
            return 0.0, 0.0, 1.0, 0.0
        return self.temperature, float(min(self.top_k, _MOST_KEPT)), self.top_p, 0.0

    def draw(self) -> tuple[float, ...]:
        """Return the numbers of the next token, as `choose_tokens` takes them."""
        numbers = self.numbers()
        return numbers if self.greedy else (*numbers[:3], self._random.random())


def _unit(vocab_size: int) -> float:
    """Return the integer that stands for weight 1: the largest power of two whose sum over a vocabulary is exact."""
    return 2.0 ** (_BITS - vocab_size.bit_length())


def choose_tokens(logits: Tensor, numbers: Tensor, likeliest: Tensor | None = None) -> Tensor:
    """Return a token int64 `[N]` for each row of `logits` `[N, V]`; runs on the device, without synchronisation.

    Args:
        numbers: float `[N, 4]`, see `RequestSampling.draw`. The order is that of transformers: temperature, top-k,
            top-p; of equal logits the first is the larger.
        likeliest: `likeliest_tokens(logits)` if it is known, which greedy rows get, and rows of NO_TOKEN whatever their
            numbers.
    """
    likeliest = likeliest_tokens(logits) if likeliest is None else likeliest
    temperature, top_k, top_p, uniform = (column[:, None] for column in numbers.double().unbind(1))
    greedy = temperature < LEAST_TEMPERATURE
    usable = torch.where((likeliest != NO_TOKEN)[:, None], logits, 0)
    ordered, tokens = usable.sort(dim=1, descending=True, stable=True)
    # Relative to the largest, so that no temperature makes weights of NaN, and the first has weight 1.
    ordered = ordered.double()
    weights = ((ordered - ordered[:, :1]) / torch.where(greedy, 1, temperature)).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = torch.where(rank == 0, 1, weights.nan_to_num(0).clamp(0, 1))
    weights = torch.where((top_k > 0) & (rank >= top_k), 0, weights)
    # A sum of integers has the same bits in any order, which libraries choose by the number of rows.
    weights = (weights * _unit(logits.shape[1])).round().long()
    reached = weights.cumsum(1)
    larger = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    kept = (larger < top_p * reached[:, -1:]) | (top_p >= 1) | (rank == 0)
    total = torch.where(kept, reached, 0).amax(1, keepdim=True)
    place = (kept & (reached <= uniform * total)).sum(1, keepdim=True)
    last = (kept & (weights > 0)).sum(1, keepdim=True) - 1  # whatever rounding did to the total
    sampled = tokens.gather(1, torch.minimum(place, last).clamp(min=0))[:, 0]
    return torch.where(greedy[:, 0] | (likeliest == NO_TOKEN), likeliest, sampled)
