"""The choice of each request's next token from its logits: greedy, or sampled by its own temperature, top-k and top-p.

A sampled token is the inverse of the kept tokens' cumulative distribution at one uniform number, which the request
draws from its own seed. So it depends on nothing but the request, whichever others are in the batch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import check

COLUMNS = 4
"""Numbers of a request that `choose_tokens` takes: temperature, top-k, top-p, uniform."""


@dataclass(slots=True)
class RequestSampling:
    """How a request samples, and its random numbers.

    Args:
        temperature: divides logits; 0 chooses the largest.
        top_k: number of tokens to choose from; 0 = all.
        top_p: fewest tokens to choose from whose probabilities sum to it; 1 = all.
        seed: seed of the request's random numbers.

    Raises E201 for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        for name, fine, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "a number from 0 on, 0 for greedy"),
            ("top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "an integer from 0 on, 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            check(fine, "E201", got=f"{name}={getattr(self, name)}", rule=f"{name} is {rule}", fix="pass such a value")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen."""
        return self.temperature == 0

    def draw(self) -> tuple[float, ...]:
        """Return the numbers of the next token, as `choose_tokens` takes them."""
        return self.temperature, self.top_k, self.top_p, 0.0 if self.greedy else self._random.random()


def choose_tokens(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return a token int64 `[N]` for each row of `logits` `[N, V]`; runs on the device, without synchronisation.

    Args:
        numbers: float32 `[N, 4]`, see `RequestSampling.draw`. The order is that of transformers: temperature, top-k,
            top-p; of equal logits the first is the larger.
    """
    temperature, top_k, top_p, uniform = (column[:, None] for column in numbers.unbind(1))
    greedy = temperature == 0
    ordered, tokens = (logits.float() / torch.where(greedy, 1, temperature)).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    probabilities = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf).softmax(1)
    larger = probabilities.cumsum(1) - probabilities
    probabilities = torch.where((larger < top_p) | (rank == 0), probabilities, 0)
    reached = probabilities.cumsum(1)
    # The last token with a probability ends the sum, whatever rounding did to it.
    place = (reached <= uniform * reached[:, -1:]).sum(1, keepdim=True)
    last = (probabilities > 0).sum(1, keepdim=True) - 1
    return tokens.gather(1, torch.where(greedy, 0, torch.minimum(place, last)))[:, 0]
