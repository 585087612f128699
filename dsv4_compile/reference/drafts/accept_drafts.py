"""Acceptance of drafted tokens: how many of them the target model keeps, and the token that follows them."""

from __future__ import annotations

import torch
from torch import Tensor

from .distributions import (
    LEAST_RESIDUAL,
    LEAST_TEMPERATURE,
    NO_TOKEN,
    draw,
    kept_weights,
    likeliest_tokens,
    weights_of,
)
from .random_numbers import ACCEPTANCE, RESIDUAL, uniform


def accept_drafts(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept the longest run of each request's drafts that keeps the target's distribution, and choose the next token.

    A request verifies N drafts d_0 .. d_(N-1) with N + 1 rows of logits: row j is the target's distribution p_j of the
    token at position L + j + 1, given the drafts before d_j. Greedy requests accept d_j if it is the likeliest token of
    row j. Others accept it if u_j * q_j(d_j) < p_j(d_j), with q_j the distribution that d_j was drawn from; after the
    first draft that fails, the next token is drawn from max(p_j - q_j, 0), or from p_j if that sums to less than 1e-8,
    and after N accepted drafts from p_N. So the tokens are distributed as without drafts.

    Args:
        logits: `[R * (N + 1), V]` float, row `r * (N + 1) + j` is row j of request r; N may be 0.
        drafts: int64 `[R, N]`. At an id outside the vocabulary, such as -1, there is no draft: verification ends there,
            and the next token is drawn from p_j.
        draft_logits: float32 `[R, N, V]`, q_j = softmax(draft_logits_j / temperature); None if drafts were chosen
            without chance, q_j(d_j) = 1. A row without a finite largest logit is no draft. Greedy requests ignore it.
        numbers: float64 `[R, 4]`: temperature, top-k, top-p and an unused one of each request. A temperature below
            2**-126 is greedy. p_j is the softmax of row j after temperature, top-k (0 for all) and top-p (1 for all),
            in that order, each keeping the smaller ids of equal logits.
        seeds: int64 `[R]`, from 0 on.
        positions: int64 `[R]`, L: position of the token that is fed before the drafts. Numbers at L + j + 1 are drawn
            from the streams ACCEPTANCE and RESIDUAL of random_numbers.py. The drawn token is the first where the sum of
            probabilities, in the order of ids and in float64, passes its number.

    Returns:
        num_new: int32 `[R]`, accepted drafts and the next token, 1 to N + 1.
        tokens: int64 `[R, N + 1]`: the accepted drafts, the next token, then -1. The next token is -1 too if its row
            has no finite largest logit; a draft at such a row is not accepted.

    A request's result depends on nothing else in the batch.
    """
    requests, count = drafts.shape
    rows = logits.unflatten(0, (requests, count + 1))
    likeliest = likeliest_tokens(rows)
    temperature, top_k, top_p, _ = (column[:, None, None] for column in numbers.double().unbind(1))
    greedy = temperature < LEAST_TEMPERATURE
    temperature = torch.where(greedy, 1, temperature)

    drafted = (drafts >= 0) & (drafts < logits.shape[1]) & (likeliest[:, :-1] != NO_TOKEN)
    ids = torch.where(drafted, drafts, 0)[..., None]
    weights = kept_weights(torch.where((likeliest != NO_TOKEN)[..., None], rows, 0), temperature, top_k, top_p)
    target = weights / weights.sum(-1, keepdim=True)
    if draft_logits is None:
        proposal = torch.zeros_like(target[:, :-1]).scatter(-1, ids, 1.0)
    else:
        known = likeliest_tokens(draft_logits) != NO_TOKEN
        weights = weights_of(torch.where(known[..., None], draft_logits, 0), temperature)
        proposal = weights / weights.sum(-1, keepdim=True)
        drafted = drafted & (known | greedy[..., 0])
    proposal = torch.where(drafted[..., None], proposal, 0)

    places = positions[:, None] + torch.arange(1, count + 2, device=positions.device)
    streams = torch.arange(ACCEPTANCE, RESIDUAL + 1, device=positions.device)[:, None, None]  # the two are neighbours
    test, rest = uniform(seeds[:, None], places, streams)
    passed = test[:, :-1] * proposal.gather(-1, ids)[..., 0] < target[:, :-1].gather(-1, ids)[..., 0]
    num_accepted = accepted(drafted & torch.where(greedy[..., 0], drafts == likeliest[:, :-1], passed))

    def of_end(values: Tensor) -> Tensor:
        """Return the last verified row of each request, `[R, ...]` for values `[R, N + 1, ...]`."""
        index = num_accepted.view(-1, *(1 for _ in values.shape[1:]))
        return values.gather(1, index.expand(-1, 1, *values.shape[2:]))[:, 0]

    end, first = of_end(target), of_end(likeliest)
    left = (end - of_end(torch.nn.functional.pad(proposal, (0, 0, 0, 1)))).clamp_min(0)
    left = torch.where(left.sum(-1, keepdim=True) < LEAST_RESIDUAL, end, left)
    drawn = draw(left, of_end(rest), first)
    return kept_tokens(drafts, num_accepted, torch.where(greedy[:, 0, 0] | (first == NO_TOKEN), first, drawn))


def accept_greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `accept_drafts` for greedy requests alone."""
    likeliest = likeliest_tokens(logits.unflatten(0, (drafts.shape[0], drafts.shape[1] + 1)))
    num_accepted = accepted((drafts == likeliest[:, :-1]) & (likeliest[:, :-1] != NO_TOKEN))
    return kept_tokens(drafts, num_accepted, likeliest.gather(1, num_accepted[:, None])[:, 0])


def accepted(passed: Tensor) -> Tensor:
    """Return the number of drafts before the first that failed, int64 `[R]` for bool `[R, N]`."""
    return passed.long().cumprod(1).sum(1)


def kept_tokens(drafts: Tensor, num_accepted: Tensor, next_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return `num_new` and `tokens` of `accept_drafts`."""
    column = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    tokens = torch.where(column == num_accepted[:, None], next_tokens[:, None], tokens)
    tokens = torch.where(column > num_accepted[:, None], NO_TOKEN, tokens)
    return (num_accepted + 1).to(torch.int32), tokens
