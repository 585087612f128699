"""`generate` of a DeepSeek-V4.1 with drafts: the host's loop over steps that keep drafts on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ...models.v41.calls import default_device
from ...models.v41.draft_generate import draft_steps_of
from ...models.v41.prefill import prefill, to_device
from ...models.v41.ranks import step_of_ranks
from ...runtime.drafting import DraftStatistics
from .._compat import mask_columns
from .batch_checks import Call, check_batch
from .cache import CACHE_NAME
from .call_checks import check_call, held_by
from .draft_columns import DraftCall
from .token_inputs import kept
from .v41_cache import NewTokens


class V41DraftCall(DraftCall):
    """A call of `generate` with drafts of a `V41ForCausalLM`."""

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        super().__init__(model, model.model.mtp.block, processors, criteria, config, streamer)

    @property
    def in_step(self) -> Any:
        """`InStep` of a split model, or None."""
        return self.model.model.in_step

    def generate(self, input_ids: Tensor, seeds: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return what transformers' loop returns for a prompt `[B, S]` and seeds `[B]`, equal on all ranks."""
        model, handle, mask = self.model, kwargs[CACHE_NAME], kwargs.get("attention_mask")
        held: Any = held_by(model, handle)
        self.begin(held, handle, input_ids.long())
        new = input_ids[:, held.appended - mask_columns(self.config, mask, input_ids) :]
        check_call(model, {"input_ids": new, "attention_mask": mask})
        check_batch(Call(new, mask, None, held), in_chunks=True)
        rows, device = len(input_ids), input_ids.device
        with modes():
            logits = self._prefill(new, mask, self.config.prefill_chunk_size)
            numbers, seeds = (to_device(values, device) for values in (self.numbers(rows), seeds))
            ends, none = held.seq_lens[:rows].long(), torch.empty((rows, 0), dtype=torch.int64, device=device)
            first = torch.ops.dsv4.accept_drafts(logits, none, None, numbers, seeds, ends - 1)[1][:, 0]
            self.steps = draft_steps_of(model.model, held.paged, self._forward(), rows)
            self.steps.load(first, ends, numbers, seeds)
            result = self.run(first)
        model.draft_statistics = DraftStatistics(tuple(self.accepted))
        return result

    def append(self, new: Tensor, mask: Tensor, last: Tensor, size: int) -> None:
        """Append columns to the cache."""
        self._prefill(new, mask, size)

    def verify(self) -> None:
        """Verify the drafts of rows that may go on, and give them their tokens."""
        pairs = zip(self.rows, self.widths(), strict=True)
        steps = [[row.last, row.cached if width else PAD_INDEX, self.limit] for row, width in pairs]
        columns = torch.tensor(steps, dtype=torch.int64, device="cpu").t().contiguous()
        with self._stepping():
            self.steps.describe(*to_device(columns, self.ids.device).unbind())
            results = self.steps.step().tolist()
        self.take(results)

    def _forward(self) -> Any:
        """Return what runs steps over the cache if the model is compiled, or None."""
        run = self.model.steps_of(self.held)
        return None if run is self.model.model else run

    def _prefill(self, new: Tensor, mask: Tensor | None, chunk: int | None) -> Tensor:
        """Append columns `[B, S]` where `mask` is not 0; return logits of the last token of each row with any."""
        model, held = self.model.model, self.held
        tokens = NewTokens.of(new, None if mask is None else kept(mask, new.shape[1]), held, model.config)
        prompts = tokens.prompts
        options: dict[str, Any] = {"requests": [one.request for one in prompts], "chunk": chunk}
        options |= {"starts": [one.start for one in prompts], "forward": self._forward()}
        with self._stepping():
            logits = prefill(model, [one.ids for one in prompts], held.paged, **options)
        tokens.note(held)
        held.rows, held.appended = len(new), held.appended + new.shape[1]
        held.drafted = held.appended
        return logits

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Run a step: until it ends, the cache is one whose last step failed."""
        self.held.interrupted = True
        with step_of_ranks(self.model.model):
            yield
        self.held.interrupted = False


@contextmanager
def modes() -> Iterator[None]:
    """Run a block in the modes that graphs were compiled in, whatever those of the caller are."""
    with torch.inference_mode(False), torch.no_grad(), default_device():
        yield
