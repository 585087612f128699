"""Steps of `generate` with drafts, each one graph: a chunk of a prompt, and the verification of drafts.

Each is a module that is called as the language model is: its call passes `call_checks.enter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...metadata import AttentionMetadata
from ...runtime.drafting import NO_DRAFT, Verify, accept_and_draft
from .begin_step import begin_step
from .cache import PagedCache
from .call_checks import EnteredOnHost
from .token_buckets import BY_ROW
from .token_inputs import kept, places_of

_nn: Any = nn


class _Step(EnteredOnHost, _nn.Module):
    """A step of a language model with drafts.

    Args:
        model: a `CompilableForCausalLM`; its `dsv4_drafts` propose tokens.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.language_model = model
        self.eval()

    def entered_model(self) -> tuple[Any, Callable[[], PagedCache]]:
        """Return the decoder stack and its cache's constructor."""
        entered: tuple[Any, Callable[[], PagedCache]] = self.language_model.entered_model()
        return entered

    def run(
        self, ids: Tensor, keep: Tensor | None, cache: PagedCache, token_rows: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None, AttentionMetadata]:
        """Return hidden states `[B, S, hidden]`, taps and metadata of the columns in `keep`, neighbours in each row.

        With `token_rows`, the arguments of `PagedCache.begin_prompts`, in place of `keep`.
        """
        stack, taps = self.language_model.model, self.language_model.dsv4_drafts.taps
        metadata, repeats, shared = begin_step(stack, ids, keep, cache, token_rows)
        if taps is None:
            return stack.run_layers(ids, metadata, cache.paged.layers, repeats, shared), None, metadata
        hidden, tapped = stack.run_layers(ids, metadata, cache.paged.layers, repeats, shared, taps=taps)
        return hidden, tapped, metadata


class PrefillStep(_Step):
    """A chunk of prompts. After the last one, the first token is chosen and the first drafts are proposed."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        following: Tensor | None,
        numbers: Tensor,
        seeds: Tensor,
        limits: Tensor,
        cache: PagedCache | None = None,
        *,
        past_key_values: PagedCache | None = None,
        token_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Append `input_ids` `[B, S]` where `attention_mask` `[B, S]` is not 0.

        Args:
            following: int64 `[B]`, the token after the last column, in a chunk that is not the last; None in the last.
            numbers, seeds: how each row samples, see `accept_drafts`.
            limits: int64 `[B]`, most tokens of a row.
            token_rows: int64 `[T]`, which `token_buckets` makes: ids and mask are `[1, T]`, tokens of those rows.

        Returns:
            The first new token of each row, int64 `[B]`, its drafts `[B, N]`, and their logits or None; after a chunk
            that is not the last `following` and no drafts.
        """
        held = past_key_values if cache is None else cache
        assert held is not None
        drafts = self.language_model.dsv4_drafts
        rows, columns = limits.shape[0], input_ids.shape[1]
        keep = kept(attention_mask, columns)
        # Kernels that pool find a row's earlier tokens in the rows before: its tokens go to the last columns.
        padding = (~keep).sum(dim=1, keepdim=True)
        places = places_of(keep, padding, first=token_rows is not None)
        ids = torch.empty_like(input_ids).scatter(1, places, input_ids)
        row = column = torch.arange(columns, device=ids.device)
        if token_rows is None:
            hidden, taps, metadata = self.run(ids, column >= padding, held)
            last = hidden[:, -1]
        else:
            hidden, taps, metadata = self.run(ids, None, held, (token_rows, keep[0]))
            sequences = torch.arange(rows, device=ids.device)
            ends = ((token_rows == sequences[:, None]) & keep).sum(dim=1).cumsum(0)
            row = (column[:, None] >= ends).sum(dim=1).clamp_max(rows - 1)  # of each token, next to those of its row
            last = hidden[0, (ends - 1).clamp_min(0)]
        lengths, caches = held.seq_lens[:rows].long(), held.draft_caches
        chosen = following
        if chosen is None:
            none = input_ids.new_empty((rows, 0))
            logits = self.language_model.lm_head(last)
            before = (lengths - 1).clamp_min(0)
            chosen = torch.ops.dsv4.accept_drafts(logits, none, None, numbers, seeds, before)[1][:, 0]
        if token_rows is None:
            after = torch.cat((ids[:, 1:], chosen[:, None]), 1).flatten()
        else:
            after = torch.where(column + 1 == ends[row], chosen[row], ids[0].roll(-1))
        drafts.inject(taps, metadata, after, caches=caches)
        if following is not None:
            return following, None, None
        fits = (lengths + drafts.num_drafts + 1 <= limits) & (chosen >= 0)
        anchors, lengths = torch.where(fits, chosen, NO_DRAFT), torch.where(fits, lengths, 0)
        proposed, logits = drafts.propose(anchors, lengths, numbers, seeds, caches=caches)
        return chosen, torch.where(fits[:, None], proposed, NO_DRAFT), logits


setattr(PrefillStep, BY_ROW, frozenset({"following", "numbers", "seeds", "limits"}))


class VerifyStep(_Step):
    """The last token of each row and its drafts: how many are kept, and the next drafts."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        drafts: Tensor,
        draft_logits: Tensor | None,
        numbers: Tensor,
        seeds: Tensor,
        limits: Tensor,
        cache: PagedCache | None = None,
        *,
        past_key_values: PagedCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Verify the columns that `attention_mask` keeps, the first ones of each row, none in an idle row.

        Args:
            input_ids: int64 `[B, N + 1]`, the last token of each row and its drafts.
            drafts: int64 `[B, N]`, the drafts to verify, -1 for none; draft_logits: float32 `[B, N, V]`, or None.
            numbers, seeds, limits: as in `PrefillStep`.

        Returns:
            int64 `[B, N + 2]`, the number of new tokens of each row, 0 for an idle one, and these tokens; the next
            input ids; and the next drafts `[B, N]` with their logits or None. An idle row keeps its drafts.
        """
        held = past_key_values if cache is None else cache
        assert held is not None
        rows, columns = input_ids.shape
        keep = kept(attention_mask, columns)
        active, lengths = keep[:, 0], held.seq_lens[:rows].long()
        hidden, taps, metadata = self.run(input_ids, keep, held)
        logits = self.language_model.lm_head(hidden.flatten(0, 1))
        fed = torch.where(keep[:, 1:], drafts, NO_DRAFT)
        step = Verify(fed, draft_logits, numbers, seeds, lengths, limits, active)
        source = self.language_model.dsv4_drafts
        done = accept_and_draft(source, held.draft_caches, logits, taps, metadata, step)
        held.seq_lens[:rows].copy_(lengths + done.num_new)
        last = done.tokens.gather(1, (done.num_new.long() - 1).clamp_min(0)[:, None])
        following = torch.cat((last, done.drafts), 1).clamp_min(0)
        next_ids = torch.where(active[:, None], following, input_ids)
        next_drafts = torch.where(active[:, None], done.drafts, drafts)
        next_logits = done.draft_logits
        if next_logits is not None and draft_logits is not None:
            next_logits = torch.where(active[:, None, None], next_logits, draft_logits)
        counted = torch.cat((done.num_new.long()[:, None], done.tokens), 1)
        return counted, next_ids, next_drafts, next_logits
