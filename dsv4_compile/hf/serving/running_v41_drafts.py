"""Drafts of a `RunningBatch` of DeepSeek-V4.1: a decode step verifies those of all slots, in one graph.

Row r of a step is slot r. Drafts stay on the device; the host says at each step which rows run, and from where.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ...models.v41.calls import default_device
from ...models.v41.compiled import CompiledSteps
from ...models.v41.prefill import to_device
from ...runtime import DraftStatistics
from ...runtime.drafting import SEEDS
from .requests import Progress


class RunningV41Drafts:
    """Drafts of the requests in slots, and the steps that verify them.

    Args:
        steps: of a model with drafts, over caches with drafts.
        slots: rows of the caches.

    Attributes:
        width: tokens of a request in a step, its last one and the drafts.
        accepted: steps of all requests by number of accepted drafts.
        read: int64 `[slots, width + 1]`, number of new tokens of each slot in the last step, and these tokens.
    """

    def __init__(self, steps: CompiledSteps, slots: int) -> None:
        assert steps.model.mtp is not None
        self._compiled, self._slots, self._most = steps, slots, steps.caches.max_seq_len
        self.width = steps.model.mtp.config.step_tokens
        self.accepted = [0] * self.width
        self.read = torch.zeros(slots, self.width + 1, dtype=torch.int64, device=steps.model.device)

    @property
    def draft_statistics(self) -> DraftStatistics:
        """Acceptance of all requests so far."""
        return DraftStatistics(tuple(self.accepted))

    def begin(self) -> None:
        """Take the steps that verify, captured or not, once they are compiled."""
        self._steps = self._compiled.drafts_for(self._slots)

    def first_tokens(self, logits: Tensor, done: Sequence[tuple[Progress, int]]) -> Tensor:
        """Choose the first token int64 `[K]` of requests with complete prompts, by logits `[K, V]`.

        Their slots have no drafts after it: the next step drafts.
        """
        sampling = [progress.sampling for progress, _ in done]
        rows = [[progress.cached - 1, slot, progress.sampling.seed % SEEDS] for progress, slot in done]
        before, places, seeds = self._sent(rows)
        settings = torch.tensor([one.numbers() for one in sampling], dtype=torch.float64, device="cpu")
        numbers = to_device(settings, logits.device)
        self._steps.join(places, numbers, seeds)
        none = torch.empty((len(done), 0), dtype=torch.int64, device=logits.device)
        first: Tensor = torch.ops.dsv4.accept_drafts(logits, none, None, numbers, seeds, before)[1][:, 0]
        return first

    def decode(self, slots: Sequence[Progress | None], decoding: Sequence[Progress]) -> None:
        """Verify the drafts of `decoding`, and draft again where there is room for a step of all tokens."""
        last = max(slot for slot, progress in enumerate(slots) if progress in decoding)
        rows = [[0, PAD_INDEX, 0] for _ in range(last + 1)]
        for slot, progress in enumerate(slots[: last + 1]):
            if progress is not None and progress in decoding:
                # Within a limit of one more token nothing is drafted.
                limit = self._most if progress.drafts else progress.cached + 1
                rows[slot] = [progress.tokens[-1], progress.cached, limit]
        self._steps.describe(*self._sent(rows))
        with default_device():
            self.read[: last + 1].copy_(self._steps.step())

    def _sent(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the columns of integers on the device."""
        columns = torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous()
        return to_device(columns, self.read.device).unbind()
