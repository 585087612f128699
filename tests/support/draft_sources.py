"""Not a test: sources of drafts without weights, with a known acceptance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Source:
    """A source without state; subclasses say what is drafted."""

    taps = None

    def __init__(self, num_drafts: int = 5, vocab: int = 512) -> None:
        self.num_drafts, self.vocab = num_drafts, vocab
        self.injected = 0

    def new_caches(self, max_batch_size: int) -> None:
        return None

    def adopt(self) -> None:
        return None

    def inject(self, taps: Any, metadata: Any, next_tokens: Any, num_new: Any = None, caches: Any = None) -> None:
        assert taps is None and caches is None

    def propose(
        self,
        anchors: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        requests: Tensor | None = None,
        caches: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        drafts = self.drafts(anchors, lengths.long())
        return torch.where((lengths > 0)[:, None], drafts, -1), self.logits(drafts)

    def drafts(self, anchors: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, drafts: Tensor) -> Tensor | None:
        return None


class Forced(Source):
    """Drafts from the target's text, so many of them right.

    Args:
        texts: int64 `[R, S]`, token of each request at each position.
        accepted: of a request of L' tokens, int64 `[R]` for `[R]`.
    """

    def __init__(self, texts: Tensor, accepted: Any, num_drafts: int = 5, vocab: int = 512) -> None:
        super().__init__(num_drafts, vocab)
        self.texts, self.accepted = texts, accepted

    def drafts(self, anchors: Tensor, lengths: Tensor) -> Tensor:
        column = torch.arange(self.num_drafts)
        places = (lengths[:, None] + 1 + column).clamp(max=self.texts.shape[1] - 1)
        rows = torch.arange(len(lengths)).clamp(max=len(self.texts) - 1)
        right = self.texts[rows[:, None], places]
        return torch.where(column < self.accepted(lengths)[:, None], right, (right + 1) % self.vocab)


class Known(Source):
    """Drafts of texts by length and last token, some of them wrong."""

    def __init__(self, texts: list[list[int]], vocab: int = 512, device: str = "cpu") -> None:
        super().__init__(vocab=vocab)
        table = torch.zeros(256, vocab, self.num_drafts, dtype=torch.int64)
        for text in texts:
            for length in range(1, len(text)):
                following = text[length + 1 : length + 1 + self.num_drafts]
                table[length, text[length], : len(following)] = torch.tensor(following)
        self.table = table.to(device)

    def drafts(self, anchors: Tensor, lengths: Tensor) -> Tensor:
        right = self.table[lengths.clamp(max=255), anchors.clamp(min=0)]
        column = torch.arange(self.num_drafts, device=lengths.device)
        return torch.where(column < (lengths * 5 % 6)[:, None], right, (right + 1) % self.vocab)


class Wrong(Forced):
    """Drafts that the target never accepts."""

    def __init__(self, texts: Tensor, num_drafts: int = 5, vocab: int = 512) -> None:
        super().__init__(texts, torch.zeros_like, num_drafts, vocab)


class Arbitrary(Source):
    """Drafts that depend on position and last token alone; few are accepted."""

    def drafts(self, anchors: Tensor, lengths: Tensor) -> Tensor:
        column = torch.arange(self.num_drafts)
        return (anchors[:, None] * 31 + lengths[:, None] * 7 + column * 13).abs() % self.vocab


class Biased(Arbitrary):
    """Drafts with logits, equal for all tokens; each is drawn as if at random."""

    def logits(self, drafts: Tensor) -> Tensor:
        return torch.zeros(*drafts.shape, self.vocab)
