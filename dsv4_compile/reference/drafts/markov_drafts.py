"""The Markov head of a draft block: drafts chosen one after the other, each biased by the token before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .distributions import LEAST_TEMPERATURE, NO_TOKEN, draw, likeliest_tokens, weights_of
from .random_numbers import PROPOSAL, uniform


def markov_drafts(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose N drafts of each request in turn, from logits base_logits_j + w2 @ w1[previous token], in float32.

    The token before d_0 is the anchor, the one before d_j is d_(j-1). A greedy request takes the likeliest token, the
    smallest id of equal logits. Others draw it from softmax(logits / temperature), without top-k and top-p.

    Args:
        base_logits: `[R, N, V]` float, of the rows of the draft block.
        anchors: int64 `[R]`, the last token of each request; one outside the vocabulary, such as -1, is padding.
        w1: `[V, rank]` float, a row for the token before.
        w2: `[V, rank]` of the dtype of w1.
        numbers: float64 `[R, 4]`: the first is the temperature, greedy below 2**-126; the others are unused.
        seeds: int64 `[R]`, from 0 on.
        positions: int64 `[R]`, position of the anchor. The number of d_j is that of position + j + 1 in the stream
            PROPOSAL of random_numbers.py. The drawn token is the first where the sum of probabilities, in the order
            of ids and in float64, passes its number.

    Returns:
        drafts: int64 `[R, N]`. -1 from the first row without a finite largest logit on, and everywhere in padding.
        draft_logits: float32 `[R, N, V]`, contiguous: the logits that drafts were chosen from. base_logits alone where
            the token before is unknown.

    A request's drafts depend on nothing else in the batch, but for the rounding of the GEMM.
    """
    temperature = numbers[:, 0].double()
    greedy = temperature < LEAST_TEMPERATURE
    divisor = torch.where(greedy, 1, temperature)[:, None]
    places = positions[:, None] + torch.arange(1, base_logits.shape[1] + 1, device=positions.device)
    chance = uniform(seeds[:, None], places, PROPOSAL)

    def choose(number: int, logits: Tensor) -> Tensor:
        likeliest = likeliest_tokens(logits)
        usable = torch.where((likeliest != NO_TOKEN)[:, None], logits, 0)
        drawn = draw(weights_of(usable, divisor), chance[:, number], likeliest)
        return torch.where(greedy | (likeliest == NO_TOKEN), likeliest, drawn)

    return chain(base_logits, anchors, w1, w2, choose)


def chain(
    base_logits: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, choose: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return drafts and their logits, with `choose(j, logits [R, V])` for the tokens int64 `[R]` of draft j."""
    drafts = anchors.new_empty(base_logits.shape[:2])
    draft_logits = base_logits.new_empty(base_logits.shape, dtype=torch.float32)
    previous, output = anchors, w2.float().t()
    for number in range(base_logits.shape[1]):
        known = (previous >= 0) & (previous < w1.shape[0])
        bias = w1.index_select(0, torch.where(known, previous, 0)).float() @ output
        logits = base_logits[:, number].float() + torch.where(known[:, None], bias, 0)
        previous = torch.where(known, choose(number, logits), NO_TOKEN)
        drafts[:, number], draft_logits[:, number] = previous, logits
    return drafts, draft_logits
