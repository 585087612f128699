"""Tests of one graph with the target's layers, taps of repeated ones included, injection and drafting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from dsv4_compile.hf.model.layer_kinds import tensors_of_step
from dsv4_compile.hf.serving.running_steps import with_repeated
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.metadata import AttentionMetadata
from tests.hf.drafting import metadata_of
from tests.hf.test_layer_kinds import ALIKE, Seen


class Step(nn.Module):
    """A verify step: the target's layers with taps, rows of kept tokens, and drafts."""

    def __init__(self, model: Any, repeats: bool) -> None:
        super().__init__()
        self.model, self.repeats = model, repeats

    def forward(
        self, ids: Tensor, metadata: AttentionMetadata, caches: Any, num_new: Tensor, lengths: Tensor
    ) -> tuple[Tensor, ...]:
        stack, drafts = self.model.model, self.model.dsv4_drafts
        repeats = stack.dsv4_repeats if self.repeats and torch.compiler.is_dynamo_compiling() else ()
        shared = tensors_of_step(metadata) if repeats else ()
        hidden, taps = stack.run_layers(ids[None], metadata, caches, repeats, shared, taps=drafts.taps)
        following = self.model.lm_head(hidden[0]).argmax(1)
        drafts.inject(taps, metadata, following, num_new)
        numbers = torch.zeros(num_new.shape[0], 4, dtype=torch.float64)
        tokens, logits = drafts.propose(following[:: drafts.num_drafts + 1], lengths, numbers, lengths.long())
        return hidden, taps, tokens, logits


def arguments(model: Any, start: int, kept: list[int]) -> tuple[Any, ...]:
    """Return the arguments of a step whose requests begin at position `start`."""
    paged, columns = model.model.dsv4_cache.paged, model.dsv4_drafts.num_drafts + 1
    rows = len(kept)
    metadata = metadata_of(model, rows, columns, start)
    ids = torch.randint(0, 512, (rows * columns,), generator=torch.Generator().manual_seed(start))
    num_new = torch.tensor(kept, dtype=torch.int32)
    return ids, metadata, paged.layers, num_new, start + num_new


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "mtp"])
def test_a_step_with_drafts_is_one_graph_with_taps_of_a_repeated_layer(kind: str) -> None:
    """Later calls, with other positions and numbers of kept tokens, reuse the graph."""
    torch.compiler.reset()
    model = tiny_model(**ALIKE)
    hf.convert(model, max_batch_size=2, max_seq_len=64, drafts=tiny_drafts(model, kind, stages=1))
    model.model.adopt()
    model.dsv4_drafts.adopt()
    assert model.model.dsv4_repeated.layers == (1,) and 1 in model.dsv4_drafts.tap_layers
    caches = model.model.dsv4_cache.paged.layers
    tensors = [*model.dsv4_drafts.caches.tensors().values(), *(t for c in caches for t in c.tensors().values())]
    calls = [arguments(model, 0, [3, 1]), arguments(model, 6, [1, 0]), arguments(model, 12, [2, 2])]
    seen, results = Seen(), []
    traced = with_repeated(torch.compile(Step(model, True), fullgraph=True, backend=seen), model, caches)
    for step in (traced, Step(model, False)):
        for tensor in tensors:
            tensor.zero_()
        results.append([step(*call) for call in calls])
    assert len(seen.traced) == 1
    for outputs in zip(*results, strict=True):
        assert all(torch.equal(got, want) for got, want in zip(*outputs, strict=True))
