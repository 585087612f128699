"""Tests of token ids of any strides: results equal those of contiguous copies."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids


def test_slices_and_transposes_are_what_their_copies_are_in_one_graph() -> None:
    original, seen = tiny_model(**LAYERS), []
    model = hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=64)

    @torch.no_grad()
    def eager(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(ids.contiguous(), use_cache=False).logits
        return logits

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(graph)
        return graph.forward

    model.compile(fullgraph=True, backend=backend)
    ids, wide = random_ids(2, 11), random_ids(4, 40)
    for given in (ids, ids.t().contiguous().t(), wide[:2, 3:20], wide[::2, :9], wide[:3, ::3], wide.t()[:3, :4]):
        mask = torch.ones_like(given)
        for each in (given, mask):
            hf.mark_dynamic_tokens(each)
        close(model(given, attention_mask=mask).logits, eager(given))
    assert len(seen) == 1
    for given in (wide[:1, :7], wide[1:2, ::2]):
        hf.mark_dynamic_tokens(given)
        close(model(given).logits, eager(given))
    assert len(seen) == 2
