"""Tests of masks with holes: the tokens of a row become neighbours before the layers, and go back to their columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.hf.model.cache import PagedCache
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids


@pytest.mark.parametrize("through_compile", [False, True])
def test_holes_in_a_row(monkeypatch: pytest.MonkeyPatch, through_compile: bool) -> None:
    original, ids = tiny_model(**LAYERS), random_ids(3, 70)
    model = hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=256)
    mask = torch.ones(3, 70, dtype=torch.long)
    mask[0, 3:9] = mask[0, 30] = mask[0, 50:] = 0
    mask[1, :5] = mask[1, 20:41] = 0
    kept: list[Tensor] = []
    begin_step = PagedCache.begin_step

    def spy(self: PagedCache, rows: int, columns: int, keep: Tensor) -> Any:
        kept.append(keep)
        return begin_step(self, rows, columns, keep)

    options = {"attention_mask": mask, "output_hidden_states": True, "output_router_logits": True}
    cache = hf.new_cache(model)
    if through_compile:
        model.compile(fullgraph=True, backend="dsv4", options={"fallback_by_default": True})
        got = model(ids, past_key_values=cache, **options)
    else:
        monkeypatch.setattr(PagedCache, "begin_step", spy)
        got = model(ids, past_key_values=cache, **options)
        # Programs of one launch pool rows that others write: the tokens of a sequence have to be neighbours.
        assert (kept[0].int().diff(dim=1) >= 0).all() and torch.equal(kept[0].sum(1), mask.sum(1))
        for a, b in zip(model(ids, attention_mask=mask, return_dict=False)[0], got.logits, strict=True):
            assert torch.equal(a, b)
    for row in range(3):
        live = mask[row] == 1
        with torch.no_grad():
            want = original(ids[row : row + 1, live], use_cache=False, **options | {"attention_mask": None})
        close(got.logits[row, live], want.logits[0])
        for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
            close(a[row, live], b[0])
        for a, b in zip(got.router_logits, want.router_logits, strict=True):
            close(a.view(3, 70, -1)[row, live], b)
    new = torch.full((3, 1), 5)
    with torch.no_grad():
        want = original(torch.cat((ids[1:2, mask[1] == 1], new[:1]), 1), use_cache=False).logits[:, -1]
    close(model(new, past_key_values=cache).logits[1:2, -1], want)
