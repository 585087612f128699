"""A step with drafts: verify N drafts and a token of each request, accept, and draft again, all on the device.

    tokens of a request   anchor, d_0 .. d_(N-1) at positions L .. L + N, which the target runs as any other step
    accept_drafts         keeps the k drafts that the target agrees with, and chooses the token after them
    propose               drafts the tokens after that one, which is the anchor at L' = L + k + 1

Nothing is taken back: a token sees the rows of its own count, and the next step writes positions from L' on again
before it reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ...modules.linear import linear_fp32
from ...parallel import all_gather
from ...runtime.drafting import NO_DRAFT, Verified, Verify, accept_and_draft
from .cache import V41Caches
from .drafts import block_step
from .model import V41Model


class DraftRows(NamedTuple):
    """Requests of a step with drafts; request r has row r of the caches.

    Attributes:
        anchors: int64 `[R]`, last token of each request, which the target has not run.
        lengths: int64 `[R]`, L, tokens that it has run, at least 1; -1 for padding.
        limits: int64 `[R]`, most tokens of a request. One that has as many is padding, and one without room for a step
            after this one gets no drafts.
        drafts: int64 `[R, N]`, -1 for none.
        draft_logits: float32 `[R, N, V]`, that they were drawn from.
        numbers, seeds: float64 `[R, 4]` and int64 `[R]`, see `accept_drafts`.
    """

    anchors: Tensor
    lengths: Tensor
    limits: Tensor
    drafts: Tensor
    draft_logits: Tensor
    numbers: Tensor
    seeds: Tensor

    @property
    def active(self) -> Tensor:
        """bool `[R]`: requests that the step runs."""
        return (self.lengths >= 0) & (self.lengths < self.limits)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, positions and requests int64 `[R * (N + 1)]` of the step; a place without a draft is padding."""
        rows, count = self.drafts.shape
        drafted = (self.drafts >= 0).long().cumprod(1) > 0
        column = torch.arange(count + 1, device=self.drafts.device)
        positions = self.lengths[:, None] + column
        fed = torch.nn.functional.pad(drafted, (1, 0), value=True) & self.active[:, None]
        fed = fed & (positions < self.limits[:, None])
        ids = torch.cat((self.anchors[:, None], self.drafts), 1)
        requests = torch.arange(rows, device=ids.device)[:, None].expand_as(ids)
        padded = [torch.where(fed, values, PAD_INDEX).flatten() for values in (positions, requests)]
        return torch.where(fed, ids, 0).flatten(), padded[0], padded[1]


class Proposals:
    """Drafts of a model for `accept_and_draft`. The target has written their context rows."""

    taps = None

    def __init__(self, model: V41Model) -> None:
        assert model.mtp is not None
        self.model, self.num_drafts = model, model.mtp.block

    def inject(self, *args: Any, **options: Any) -> None:
        """Do nothing: a step of the model writes context rows of all of its tokens."""

    def propose(
        self,
        anchors: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        requests: Tensor | None = None,
        caches: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft N tokens of each request, see `runtime.DraftSource`; `caches` are those of the draft layers."""
        rows = torch.arange(len(anchors), device=anchors.device) if requests is None else requests
        return propose(self.model, anchors, lengths, rows, numbers, seeds, caches)


def propose(
    model: V41Model,
    anchors: Tensor,
    lengths: Tensor,
    requests: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    caches: V41Caches,
) -> tuple[Tensor, Tensor]:
    """Draft N tokens of each request.

    Args:
        anchors: int64 `[R]`, last token of each request, which the target has not run; -1 for padding.
        lengths: int64 `[R]`, tokens before the anchor, whose context rows are written; 0 for padding.
        requests: int64 `[R]`, rows of the caches.
        numbers, seeds: float64 `[R, 4]` and int64 `[R]`, see `markov_drafts`.
        caches: of the draft layers.

    Returns:
        Drafts int64 `[R, N]`, -1 in padding, and the float32 logits `[R, N, V]` that they were chosen from.
    """
    assert model.mtp is not None
    last, keep = model.mtp.last, (anchors >= 0) & (lengths > 0)
    base = block_logits(model, *block(model, torch.where(keep, anchors, PAD_INDEX), lengths, requests, caches))
    base = base.unflatten(0, (-1, model.mtp.block))
    heads = last.markov_head.embed.weight, last.markov_head.head.weight
    drafts, logits = torch.ops.dsv4.markov_drafts(
        base, torch.where(keep, anchors, NO_DRAFT), *heads, numbers, seeds, lengths
    )
    return drafts, logits


def block(
    model: V41Model, anchors: Tensor, lengths: Tensor, requests: Tensor, caches: V41Caches
) -> tuple[Tensor, Tensor]:
    """Return streams `[R * N, 4, D]` and coefficients pre of each request's block after the last stage."""
    assert model.mtp is not None
    keep = (anchors >= 0) & (lengths > 0)
    first = torch.where(keep & (anchors < model.vocab), anchors, 0)[:, None]
    ids = torch.nn.functional.pad(first, (0, model.mtp.block - 1), value=model.mtp.noise_token)
    sizes = {"window": model.window, "image_token": model.image_token}
    step = block_step(ids, torch.where(keep, lengths, PAD_INDEX), requests, caches, **sizes)
    return model.mtp.run_block(*model.first_streams(step.ids), step, caches)


def block_logits(model: V41Model, streams: Tensor, pre: Tensor) -> Tensor:
    """Return the target head's float32 logits `[T, V]` of a block's streams, before the head of token pairs."""
    assert model.mtp is not None
    norm = model.mtp.last.norm
    hidden = torch.ops.dsv4.mhc_collapse(streams, pre, norm.weight, norm.eps)
    return all_gather(linear_fp32(hidden, model.head.weight), model.ranks)


def follow(model: V41Model, logits: Tensor, rows: DraftRows, caches: V41Caches) -> Verified:
    """Accept drafts by the target's logits `[R * (N + 1), V]` of `rows.tokens()`, and draft again."""
    assert caches.drafts is not None
    step = Verify(
        rows.drafts,
        rows.draft_logits,
        rows.numbers,
        rows.seeds,
        rows.lengths.clamp_min(0),
        rows.limits,
        rows.active,
    )
    source: Any = Proposals(model)
    unused: Any = None
    return accept_and_draft(source, caches.drafts, logits, None, unused, step)


def verify(model: V41Model, rows: DraftRows, caches: V41Caches, marked: bool = False) -> Verified:
    """Run a whole step: one graph of `torch.compile`."""
    return follow(model, model.logits(*rows.tokens(), caches, marked=marked), rows, caches)
