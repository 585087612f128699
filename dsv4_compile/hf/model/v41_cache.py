"""Paged caches of DeepSeek-V4.1 with transformers' cache interface, and the new tokens of a call over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...models.v41.cache import V41Caches
from ...models.v41.calls import Prompt, ids_of
from ...models.v41.compiled import CompiledSteps
from ...models.v41.config import V41Config
from .cache import PagedCache


class V41Cache(PagedCache):
    """Caches of a DeepSeek-V4.1 with transformers' cache interface, and the record that `PagedCache` keeps.

    Attributes:
        steps: what a compiled model runs over these caches; None before its first call.
    """

    def __init__(self, paged: V41Caches) -> None:
        self._hold(paged, paged.windows, paged.window_table.device)
        self.steps: CompiledSteps | None = None


class NewTokens(NamedTuple):
    """New tokens of each sequence of a batch, on the CPU.

    Attributes:
        prompts: those of each sequence that has any.
        starts: tokens that each sequence has in the cache.
        columns: int64, columns of each sequence's new tokens in the batch `[B, S]`.
    """

    prompts: list[Prompt]
    starts: list[int]
    columns: list[Tensor]

    @classmethod
    def of(cls, ids: Tensor, keep: Tensor | None, cache: PagedCache, config: V41Config) -> NewTokens:
        """Return the tokens that `keep` marks in `ids` `[B, S]`, None = all. Waits for the device."""
        on_host, starts = ids.cpu(), cache.seq_lens[: len(ids)].tolist()
        live = torch.ones_like(on_host, dtype=torch.bool) if keep is None else keep.cpu()
        columns = [row.nonzero()[:, 0] for row in live]
        rows = [row for row in range(len(ids)) if len(columns[row])]
        prompts = [Prompt(ids_of(on_host[row, columns[row]], config), row, starts[row]) for row in rows]
        return cls(prompts, starts, columns)

    def note(self, cache: PagedCache, more: list[int] | None = None) -> None:
        """Let the cache have these tokens, and `more` of each sequence."""
        counts = zip(self.starts, map(len, self.columns), more or [0] * len(self.starts), strict=True)
        lengths = torch.tensor([sum(count) for count in counts], device="cpu")
        cache.seq_lens[: len(lengths)] = lengths.to(cache.seq_lens)
