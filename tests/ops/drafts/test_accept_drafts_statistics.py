"""Drafted text has the target's distribution: chi-square over all strings of three tokens of a vocabulary of eight.

The target is a Markov chain, so that the law of a string is known. Seeds are fixed: a test passes always or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.drafts.accept_drafts import accept_drafts
from dsv4_compile.ops.drafts.markov_drafts import markov_drafts
from dsv4_compile.reference.drafts import accept_drafts as acceptance
from dsv4_compile.reference.drafts import markov_drafts as proposal
from dsv4_compile.reference.drafts.random_numbers import ACCEPTANCE, RESIDUAL, uniform
from tests.ops.drafts.drafting import target

VOCABULARY, LENGTH, REQUESTS, DRAFTS = 8, 3, 20_000, 2
ANCHOR = 5
GENERATOR = torch.Generator().manual_seed(3)
TABLE = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR)
"""Target's logits after each token."""
W1, W2 = TABLE + 0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR), torch.eye(VOCABULARY)
SETTINGS = [(1.0, 0.0, 1.0), (0.7, 5.0, 1.0), (1.3, 0.0, 0.7), (1.0, 6.0, 0.8), (30.0, 0.0, 1.0)]
"""Temperature, top-k and top-p."""
Drafter = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, "Tensor | None"]]


def sampled(anchors: Tensor, numbers: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drafts of the Markov head, and the logits that they were drawn from."""
    base = torch.zeros(len(anchors), DRAFTS, VOCABULARY)
    return markov_drafts(base, anchors, W1, W2, numbers, seeds, positions)


def fixed(anchors: Tensor, numbers: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """The target's likeliest tokens, without chance."""
    first = TABLE.argmax(-1)[anchors]
    return torch.stack((first, TABLE.argmax(-1)[first]), 1), None


def absent(anchors: Tensor, numbers: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """One draft, then none."""
    drafts, _ = fixed(anchors, numbers, seeds, positions)
    drafts[:, 1] = -1
    return drafts, None


def decode(drafter: Drafter, setting: tuple[float, float, float]) -> tuple[Tensor, float]:
    """Return strings int64 `[REQUESTS, LENGTH]`, and the tokens of the first step on average."""
    numbers = torch.tensor([[*setting, 0.0]], dtype=torch.float64).expand(REQUESTS, -1)
    seeds, lengths = torch.arange(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64)
    text = torch.full((REQUESTS, LENGTH + DRAFTS + 2), -1)
    text[:, 0] = ANCHOR
    first = 0.0
    while int(lengths.min()) < LENGTH:
        anchors = text.gather(1, lengths[:, None])[:, 0]
        drafts, draft_logits = drafter(anchors, numbers, seeds, lengths)
        fed = torch.cat((anchors[:, None], drafts), 1).clamp_min(0)
        num_new, tokens = accept_drafts(TABLE[fed].flatten(0, 1), drafts, draft_logits, numbers, seeds, lengths)
        live = (lengths < LENGTH)[:, None]
        place = lengths[:, None] + torch.arange(1, DRAFTS + 2)
        place = torch.where(live, place, text.shape[1] - DRAFTS - 1 + torch.arange(DRAFTS + 1))
        text.scatter_(1, place, torch.where(live, tokens, -1))
        lengths = torch.where(live[:, 0], lengths + num_new, lengths)
        first = first or float(num_new.double().mean())
    return text[:, 1 : LENGTH + 1], first


def excess(text: Tensor, setting: tuple[float, float, float]) -> float:
    """Return the chi-square statistic, in standard deviations above its mean."""
    step = np.stack([target(row, *setting) for row in TABLE.double().numpy()])
    law = step[ANCHOR][:, None, None] * step[:, :, None] * step[None]
    cells = (text * torch.tensor([64, 8, 1])).sum(1)
    counts = torch.bincount(cells, minlength=law.size).numpy()
    want = len(text) * law.flatten()
    assert (counts[want == 0] == 0).all(), "a string that the target never writes"
    likely = want >= 5
    groups = [*zip(counts[likely], want[likely], strict=True), (counts[~likely].sum(), want[~likely].sum())]
    statistic = sum((count - mean) ** 2 / mean for count, mean in groups if mean > 0)
    freedom = len(groups) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("drafter", [sampled, fixed, absent])
def test_strings_have_the_targets_distribution(drafter: Drafter, setting: tuple[float, float, float]) -> None:
    text, first = decode(drafter, setting)
    assert 1.1 < first < DRAFTS + 1
    assert excess(text, setting) < 4


@pytest.mark.parametrize("stream", [ACCEPTANCE, RESIDUAL])
def test_a_stream_that_proposals_share_shows(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "PROPOSAL", stream)
    text, _ = decode(sampled, SETTINGS[0])
    assert excess(text, SETTINGS[0]) > 20


def test_a_stream_that_tests_and_residuals_share_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(seeds: Tensor, positions: Tensor, stream: Any) -> Tensor:
        return uniform(seeds, positions, 0 * stream + ACCEPTANCE)

    monkeypatch.setattr(acceptance, "uniform", shared)
    text, _ = decode(sampled, SETTINGS[0])
    assert excess(text, SETTINGS[0]) > 20


def test_the_token_after_all_drafts_has_the_targets_distribution() -> None:
    """Rows before the last allow nothing but the drafts, so that all are accepted."""
    only = torch.where(torch.arange(VOCABULARY) == torch.tensor([[3], [6]]), 0.0, -torch.inf)
    rows = torch.cat((only, TABLE[6][None])).repeat(REQUESTS, 1)
    numbers = torch.tensor([[0.8, 6.0, 0.9, 0.0]], dtype=torch.float64).expand(REQUESTS, -1)
    seeds = torch.arange(REQUESTS)
    drafts = torch.tensor([[3, 6]]).expand(REQUESTS, -1)
    num_new, tokens = accept_drafts(rows, drafts, None, numbers, seeds, seeds * 0)
    assert num_new.eq(3).all()
    want = REQUESTS * target(TABLE[6].double().numpy(), 0.8, 6.0, 0.9)
    counts = torch.bincount(tokens[:, 2], minlength=VOCABULARY).numpy()
    kept = want > 0
    assert (counts[~kept] == 0).all()
    freedom = kept.sum() - 1
    assert ((counts - want)[kept] ** 2 / want[kept]).sum() < freedom + 4 * math.sqrt(2 * freedom)
