"""The two kinds of steps of a `RunningBatch`, at fixed addresses, and the numbers that they send to the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cache import LayerCache
from ...metadata import AttentionMetadata, MetadataBuffers
from ...runtime import DecodeRunner
from ...runtime.repeated_layers import Handed, handed, marks_are_written_out
from ...runtime.step import Buckets, StepFunction, StepInputs, no_requests, step_call
from ..model.layer_kinds import Repeated, tensors_of_step
from .sampling import COLUMNS, likeliest_tokens


class _Tokens(nn.Module):  # type: ignore[misc]
    """Tokens of any requests through the layers of a converted model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def layers(
        self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache], **options: Any
    ) -> Any:
        """Return hidden states `[T, hidden]` of `input_ids` `[T]`, and taps if `options` ask for them."""
        stack = self.model.model
        # The state names all that layers depend on, and is guarded.
        repeated = torch.compiler.is_dynamo_compiling() and marks_are_written_out() and stack.dsv4_state
        repeats = stack.dsv4_repeats if repeated else ()
        shared = tensors_of_step(metadata) if repeats else ()
        result = stack.run_layers(input_ids[None], metadata, caches, repeats, shared, **options)
        return (result[0][0], result[1]) if options else result[0]


class TappedTokens(_Tokens):
    """Tokens of any requests, with what the model's drafts read of its layers."""

    def tapped(
        self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, ...]:
        """Return hidden states `[T, hidden]`, and taps `[T, ...]` if the drafts have any."""
        taps = self.model.dsv4_drafts.taps
        if taps is None:
            return (self.layers(input_ids, metadata, caches),)
        hidden, tapped = self.layers(input_ids, metadata, caches, taps=taps)
        return hidden, tapped


def with_repeated(step: StepFunction, model: Any, caches: Sequence[LayerCache]) -> StepFunction:
    """Return `step`, of `model` with `caches`, so that its graphs get the tensors of repeated layers at each call."""

    def call(*args: Any) -> Any:
        repeated: Repeated = model.model.dsv4_repeated
        token = handed.set(Handed(repeated.weights, repeated.caches(caches)))
        try:
            return step(*args)
        finally:
            handed.reset(token)

    return call


class DecodeTokens(_Tokens):
    """One token of each request: its `sampling.likeliest_tokens` int64 `[T]`, and all logits `[T, vocab]`."""

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(self.layers(input_ids, metadata, caches))
        return likeliest_tokens(logits), logits


class PrefillTokens(_Tokens):
    """Prompt tokens of any requests: hidden states `[T, hidden]`, since few rows need logits."""

    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]) -> Tensor:
        hidden: Tensor = self.layers(input_ids, metadata, caches)
        return hidden


class TappedPrefill(TappedTokens):
    """`PrefillTokens` of a model with drafts: hidden states, and what the drafts read."""

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, ...]:
        return self.tapped(input_ids, metadata, caches)


class Staged:
    """Numbers on their way to the device: from pinned memory, so that the host waits for no copy.

    They are sent once a step, and the read at its end keeps the next step from writing them too early.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(size, dtype=dtype, device=device)

    def send(self, *groups: Sequence[float]) -> tuple[Tensor, ...]:
        """Copy groups of numbers in one transfer, and return a view on the device of each."""
        values = [value for group in groups for value in group]
        self.host[: len(values)] = torch.tensor(values, dtype=self.host.dtype, device="cpu")
        self.device[: len(values)].copy_(self.host[: len(values)], non_blocking=True)
        return self.device[: len(values)].split([len(group) for group in groups])


class Part:
    """The prefill or the decode of a step: its graphs, or plain calls, and the numbers that it sends."""

    def __init__(
        self,
        step: StepFunction,
        buffers: MetadataBuffers,
        caches: list[LayerCache],
        buckets: Collection[int],
        graphs: str,
    ) -> None:
        inputs = {"input_ids": buffers.tensors["input_ids"]}
        self.runner: DecodeRunner | None = None
        if graphs != "off":
            self.runner = DecodeRunner(step, buffers, inputs=inputs, caches=caches, buckets=buckets, graphs=graphs)
        self.buffers, self.buckets = buffers, Buckets(buckets, buffers.max_num_batched_tokens)
        self._calls = {
            size: step_call(step, buffers, StepInputs(inputs, buffers.max_num_batched_tokens), caches, size)
            for size in self.buckets.sizes
        }
        device = buffers.tensors["seq_lens"].device
        numbers = 2 * buffers.max_num_batched_tokens + 4 * buffers.max_num_seqs + 1
        self.ints = Staged(numbers, torch.int64, device)
        self.floats = Staged(buffers.max_num_seqs * COLUMNS, torch.float64, device)

    def compile(self) -> None:
        """Run a step of padding alone of each graph: torch.compile has one for one row, and one for several."""
        with no_requests(self.buffers):
            for size in self.buckets.sizes[: 2 if self.buckets.sizes[0] == 1 else 1]:
                self._calls[size]()

    def run(self, tokens: list[list[int]], lengths: list[int], places: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Run the step for new `tokens` of each slot, which then holds `lengths`; return outputs and `places` there."""
        starts = [0]
        for new in tokens:
            starts.append(starts[-1] + len(new))
        rows, lens, ids, *sent = self.ints.send(starts, lengths, [i for new in tokens for i in new], *places)
        self.buffers.load(rows, lens, input_ids=ids)
        if self.runner is not None:
            return self.runner.step(starts[-1]), sent
        size = self.buckets.fit(starts[-1])
        assert size is not None
        return self._calls[size](), sent
