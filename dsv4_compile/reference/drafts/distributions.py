"""Distributions over a vocabulary in float64, in the order of token ids, and a token drawn from one."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Result for a row of logits without a finite largest value, and a place without a draft."""
LEAST_TEMPERATURE = 2.0**-126
"""Smallest normal float32, the least divisor of a logit; sampling is greedy below it."""
LEAST_RESIDUAL = 1e-8
"""Sum of max(p - q, 0) below which a token is drawn from p: the rest is rounding."""


def likeliest_tokens(logits: Tensor) -> Tensor:
    """Return the first token with the largest logit of each row, int64 `[...]` for logits `[..., V]`.

    NO_TOKEN for a row without a finite largest logit.
    """
    largest, tokens = logits.max(-1)
    return torch.where(largest.abs() < torch.inf, tokens, NO_TOKEN)


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logit - largest) / temperature), float64 `[..., V]`: the softmax, with 1 for the largest weight.

    Args:
        logits: `[..., V]`; the largest of each row is finite.
        temperature: float64 that broadcasts with the logits.
    """
    wide = logits.double()
    return ((wide - wide.amax(-1, keepdim=True)) / temperature).exp()


def kept_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the weights of the tokens that top-k and then top-p keep, 0 for others; float64 `[..., V]`.

    Args:
        logits: `[..., V]`; the largest of each row is finite.
        temperature, top_k, top_p: float64 that broadcast with the logits. The `top_k` largest are kept, all if it is 0;
            then the fewest that sum to a probability of `top_p`, at least one, all if it is 1. Of equal logits the
            token of the smaller id is kept first.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    weights = weights_of(ordered, temperature)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    weights = torch.where((top_k > 0) & (rank >= top_k), 0, weights)
    reached = weights.cumsum(-1)
    larger = torch.nn.functional.pad(reached[..., :-1], (1, 0))
    mask = (larger < top_p * reached[..., -1:]) | (top_p >= 1) | (rank == 0)
    return torch.zeros_like(weights).scatter(-1, tokens, torch.where(mask, weights, 0))


def draw(weights: Tensor, uniform: Tensor, otherwise: Tensor) -> Tensor:
    """Return the first token where the sum of weights passes `uniform` times the total: the inverse of the CDF.

    Args:
        weights: float64 `[..., V]`, at least 0.
        uniform: float64 `[...]` in [0, 1).
        otherwise: int64 `[...]`, the result where no weight is positive or their sum is NaN.

    Returns:
        int64 `[...]`, a token with a positive weight.
    """
    reached = weights.cumsum(-1)
    total = reached[..., -1]
    token = (reached <= (uniform * total)[..., None]).sum(-1)
    ids = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, ids, -1).amax(-1)  # whatever rounding did to the total
    return torch.where((last >= 0) & (total < torch.inf), torch.minimum(token, last), otherwise)
