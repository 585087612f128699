"""The Markov head of a draft block, without distributions where all requests are greedy."""

from __future__ import annotations

from torch import Tensor

from ...reference.drafts import markov_drafts as reference
from ...reference.drafts.distributions import LEAST_TEMPERATURE, likeliest_tokens


def markov_drafts(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does."""
    if (numbers[:, 0] < LEAST_TEMPERATURE).all():
        return reference.chain(base_logits, anchors, w1, w2, lambda number, logits: likeliest_tokens(logits))
    return reference.markov_drafts(base_logits, anchors, w1, w2, numbers, seeds, positions)
