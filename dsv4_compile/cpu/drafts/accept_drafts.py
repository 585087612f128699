"""Acceptance of drafts: the distributions of sampled requests alone are computed."""

from __future__ import annotations

from torch import Tensor

from ...reference.drafts import accept_drafts as reference
from ...reference.drafts.distributions import LEAST_TEMPERATURE
from ..common.invariant import is_required


def accept_drafts(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does."""
    num_new, tokens = reference.accept_greedy(logits, drafts)
    sampled = (~(numbers[:, 0] < LEAST_TEMPERATURE)).nonzero()[:, 0]
    # A row that is sampled alone is summed in the same order in every batch.
    for some in sampled.split(1) if is_required() else (sampled,) if len(sampled) else ():
        rows = logits.unflatten(0, (len(drafts), drafts.shape[1] + 1))[some].flatten(0, 1)
        proposal = None if draft_logits is None else draft_logits[some]
        of_request = drafts[some], proposal, numbers[some], seeds[some], positions[some]
        num_new[some], tokens[some] = reference.accept_drafts(rows, *of_request)
    return num_new, tokens
