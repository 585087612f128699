"""Samples of speculative decoding. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ._samples_step import Args, Step, sample

REQUESTS, DRAFTS, VOCAB, RANK = 5, 3, 40, 16
NUMBERS = ((0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.7, 5.0, 1.0), (1.5, 0.0, 0.8), (0.9, 20.0, 0.6))
"""Temperature, top-k and top-p of each request."""


def _requests() -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, seeds and positions."""
    numbers = torch.tensor([(*row, 0.5) for row in NUMBERS], dtype=torch.float64)
    return numbers, torch.tensor([0, 7, 2**40 + 1, 7, 2**63 - 1]), torch.tensor([0, 12, 127, 2**20, 12])


@sample
def accept_drafts(s: Step) -> list[Args]:
    logits = s.randn(REQUESTS * (DRAFTS + 1), VOCAB, dtype=torch.float32)
    draft_logits = s.randn(REQUESTS, DRAFTS, VOCAB, dtype=torch.float32)
    likely = logits.view(REQUESTS, DRAFTS + 1, VOCAB)[:, :-1].argmax(-1)
    mixed = likely.clone()
    mixed[1, 2] = mixed[3, 0] = -1
    mixed[2] = s.randint(0, VOCAB, DRAFTS)
    mixed[4, 1] = VOCAB
    strange = logits.bfloat16()
    strange[2, 3], strange[5] = torch.nan, -torch.inf
    strange[8::4, ::2] = -torch.inf
    unknown = draft_logits.clone()
    unknown[1, 0], unknown[4, 1] = torch.nan, torch.inf
    greedy = _requests()[0] * 0
    return [
        (logits, likely, draft_logits, *_requests()),
        (logits, mixed, None, *_requests()),
        (strange, likely, unknown, *_requests()),
        (logits, mixed, None, greedy, *_requests()[1:]),
        (logits[:REQUESTS], likely[:, :0], None, *_requests()),
        (logits[:0], likely[:0], None, *(x[:0] for x in _requests())),
    ]


@sample
def markov_drafts(s: Step) -> list[Args]:
    base = s.randn(REQUESTS, DRAFTS, VOCAB, dtype=torch.float32)
    w1, w2 = (s.randn(VOCAB, RANK) for _ in range(2))
    anchors = torch.tensor([3, VOCAB - 1, -1, 0, VOCAB])
    strange = base.bfloat16()
    strange[0, 1], strange[1, :, ::2], strange[3, 2, 7] = torch.nan, -torch.inf, torch.inf
    return [
        (base, anchors.clamp(0, VOCAB - 1), w1, w2, *_requests()),
        (strange, anchors, w1.float(), w2.float(), *_requests()),
        (base, anchors, w1, w2, _requests()[0] * 0, *_requests()[1:]),
        (base[:0], anchors[:0], w1, w2, *(x[:0] for x in _requests())),
    ]
