"""Decode steps of a `RunningBatch` with drafts: N + 1 tokens of each slot, verified, accepted and drafted in one graph.

Row r of a step is slot r. A slot without a request that decodes is padding in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...cache import LayerCache
from ...metadata import AttentionMetadata, MetadataBuffers
from ...metadata.types import metadata_of
from ...runtime import DecodeRunner, DraftStatistics, Statistics
from ...runtime.bucket_sizes import request_buckets
from ...runtime.drafting import NO_DRAFT, NUMBERS, SEEDS, Drafting, accept_and_draft
from ...runtime.step import Buckets, StepFunction, StepInputs, no_requests, step_call
from .requests import Progress
from .running_steps import Staged, TappedTokens

Compile = Callable[[Any], Any]


class CompiledSource:
    """A source of drafts with compiled methods, and all that follows the logits of a step as one graph."""

    def __init__(self, source: Any, compiled: Compile) -> None:
        self.num_drafts, self.taps = source.num_drafts, source.taps
        self.inject, self.propose = compiled(source.inject), compiled(source.propose)
        self.accept_and_draft = compiled(partial(accept_and_draft, source))
        self.new_caches = source.new_caches


class VerifyTokens(TappedTokens):
    """The tokens that requests verify: all logits `[T, vocab]`, and taps."""

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, ...]:
        hidden, *taps = self.tapped(input_ids, metadata, caches)
        return (self.model.lm_head(hidden), *taps)


class RunningDrafts:
    """Drafts of the requests in slots, and the steps that verify them.

    Args:
        source: proposes drafts; compiled, if it is to be.
        step: a `VerifyTokens`, compiled likewise.
        buffers, caches: of the batch.
        graphs: "off", or what `DecodeRunner` takes.

    Attributes:
        accepted: steps of all requests by number of accepted drafts.
    """

    def __init__(
        self, source: Any, step: StepFunction, buffers: MetadataBuffers, caches: list[LayerCache], graphs: str
    ) -> None:
        slots, device = buffers.max_num_seqs, buffers.tensors["seq_lens"].device
        self.source, self.count, self.width = source, source.num_drafts, source.num_drafts + 1
        self.caches = source.new_caches(slots)
        self.buffers, self.accepted = buffers, [0] * self.width
        inputs = {"input_ids": buffers.tensors["input_ids"]}
        sizes = tuple(requests * self.width for requests in request_buckets(slots))
        self.runner: DecodeRunner | None = None
        if graphs == "off":
            self.drafting = Drafting(buffers, source, self.caches, 1)
            rows = StepInputs(inputs, buffers.max_num_batched_tokens)
            self._calls = {size: step_call(step, buffers, rows, caches, size) for size in sizes}
        else:
            options: dict[str, Any] = {"drafts": source, "draft_caches": self.caches, "max_run_steps": 1}
            self.runner = DecodeRunner(
                step, buffers, inputs=inputs, caches=caches, buckets=sizes, graphs=graphs, **options
            )
            assert self.runner.drafting is not None
            self.drafting = self.runner.drafting
        self._buckets = Buckets(sizes, buffers.max_num_batched_tokens)
        self._ints = Staged(slots * (self.width + 3) + 1, torch.int64, device)
        self._joining = Staged(3 * slots, torch.int64, device)
        self._numbers = Staged(slots * NUMBERS, torch.float64, device)
        self._rows = 0
        # Numbers of new tokens, and the tokens, of each slot in the last step.
        self.read = torch.zeros(slots, self.width + 1, dtype=torch.int64, device=device)

    @property
    def statistics(self) -> Statistics:
        """Captures and replays; all zero without graphs."""
        return Statistics() if self.runner is None else self.runner.statistics

    @property
    def draft_statistics(self) -> DraftStatistics:
        """Acceptance of all requests so far."""
        return DraftStatistics(tuple(self.accepted))

    def compile(self) -> None:
        """Run a step of padding alone of each graph, and the drafts of new requests."""
        with no_requests(self.buffers):
            self.drafting.draft()  # first: steps compile once more where no logits of drafts are kept yet
            for size in self._buckets.sizes[:2]:
                self.drafting.begin()
                self.drafting.finish_step(self._calls[size](), size // self.width)

    def has_room(self, progress: Progress) -> bool:
        """Return whether the slot of a request has room for all tokens of a step."""
        return progress.cached + self.width <= self.buffers.max_model_len

    def inject(self, size: int, taps: Sequence[Tensor], following: Tensor, rows: Tensor, chosen: Tensor) -> None:
        """Let drafts read a chunk of prompts, which the buffers describe.

        Args:
            size: tokens of the chunk, padding included.
            taps: of these tokens, `[size, ...]`, or nothing.
            following: int64, the token after each one, -1 where the host does not know it.
            rows: int64 `[K]`, tokens after which `chosen` `[K]` follow.
        """
        following = torch.nn.functional.pad(following, (0, size - len(following)), value=NO_DRAFT)
        following.index_copy_(0, rows, chosen)
        tensors = {name: tensor[:size] for name, tensor in self.buffers.tensors.items()}
        metadata = metadata_of(tensors, self.buffers.block_tables)
        self.source.inject(taps[0] if taps else None, metadata, following, caches=self.caches)

    def join(self, done: Sequence[Progress], slots: Sequence[int], chosen: Tensor) -> None:
        """Draft for requests with complete prompts: `chosen` int64 `[slots]` has their first tokens."""
        drafting = self.drafting
        seeds = [progress.sampling.seed % SEEDS for progress in done]
        lengths = [progress.cached if progress.drafts else 0 for progress in done]
        places, lens, own_seeds = self._joining.send(slots, lengths, seeds)
        values = [value for progress in done for value in progress.sampling.numbers()]
        (numbers,) = self._numbers.send(values)
        drafting.numbers.index_copy_(0, places, numbers.view(-1, NUMBERS))
        drafting.seeds.index_copy_(0, places, own_seeds)
        drafting.drafts.index_fill_(0, places, NO_DRAFT)
        drafting.anchors.fill_(NO_DRAFT).index_copy_(0, places, chosen[places])
        drafting.lengths.zero_().index_copy_(0, places, lens)
        if any(lengths):
            if self.runner is None:
                drafting.draft()
            else:
                self.runner.draft()

    def decode(self, slots: Sequence[Progress | None], decoding: Sequence[Progress]) -> None:
        """Verify the drafts of `decoding`, which have room."""
        last = max(slot for slot, progress in enumerate(slots) if progress in decoding)
        self._rows = rows = last + 1
        served = [progress if progress in decoding else None for progress in slots[:rows]]
        starts = [row * self.width for row in range(rows + 1)]
        lengths = [0 if progress is None else progress.cached + self.width for progress in served]
        # Of a request without drafts no next step fits, so none is drafted; the next load says how it goes on.
        most = self.buffers.max_model_len
        reserved = [most if progress is not None and progress.drafts else 0 for progress in served]
        ids = [token for p in served for token in (p.tokens[-1] if p else 0, *[0] * self.count)]
        loaded = self._ints.send(starts, lengths, reserved, ids)
        self.buffers.load(loaded[0], loaded[1], reserved=loaded[2], input_ids=loaded[3])
        self.drafting.feed(rows)
        if self.runner is not None:
            tokens, counts = self.runner.run(1, rows)
        else:
            size = self._buckets.fit(rows * self.width)
            assert size is not None
            self.drafting.begin()
            self.drafting.finish_step(self._calls[size](), size // self.width)
            tokens, counts = self.drafting.result(1, rows)
        self.read[:rows, 0].copy_(counts[0])
        self.read[:rows, 1:].copy_(tokens[0])


def new_tokens(
    drafts: Any, slots: Sequence[Progress | None], chosen: Sequence[int], verified: Collection[Progress]
) -> list[list[int]]:
    """Return the new tokens of each slot, and record what verified steps gave their requests.

    Args:
        drafts: those of the batch, with `width` and `accepted`.
        chosen: a token of each slot, then a number of new tokens and these tokens for each slot.
        verified: requests whose drafts the step verified; they have the tokens that follow.
    """
    count, width, new = len(slots), drafts.width + 1, []
    for slot, progress in enumerate(slots):
        if progress is not None and progress in verified:
            number, *tokens = chosen[count + slot * width : count + (slot + 1) * width]
            progress.cached += number
            progress.accepted[number - 1] += 1
            drafts.accepted[number - 1] += 1
            new.append(tokens[:number])
        else:
            new.append([chosen[slot]])
    return new
