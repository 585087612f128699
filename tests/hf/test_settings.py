"""Tests of settings, modules and a vocabulary that change after convert: they are used, or unsupported by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dsv4_compile import hf
from tests.hf.small import close, random_ids

BOTH = pytest.mark.parametrize("attention_only", [True, False])


def converted(original: Any, attention_only: bool = True) -> Any:
    return hf.convert(copy.deepcopy(original), max_batch_size=2, max_seq_len=256, attention_only=attention_only)


def frequencies(model: Any) -> list[tuple[Any, str]]:
    """Return all modules with a buffer of RoPE frequencies, and its name."""
    found = ((m, name) for m in model.model.modules() for name in m._buffers if name.endswith("inv_freq"))
    return [(module, name) for module, name in found if not name.startswith("original")]


@BOTH
@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("which", [0, -1])
def test_other_rope_frequencies_are_refused(original: Any, how: str, which: int, attention_only: bool) -> None:
    model, ids = converted(original, attention_only), random_ids(1, 9)
    want = model(ids).logits
    module, name = frequencies(model)[which]
    before = getattr(module, name).clone()
    if how == "in place":
        getattr(module, name).mul_(0.5)
    else:
        setattr(module, name, before * 0.5)
    with pytest.raises(ValueError, match=rf"E208[\s\S]*got   {name} of "):
        model(ids)
    with torch.no_grad():
        getattr(module, name).copy_(before)
    assert torch.equal(model(ids).logits, want)
    model.bfloat16().float()  # transformers rounds its frequencies; the layers' tables stay as they are
    assert model(ids).logits.isfinite().all()


def test_a_cache_that_was_allocated_in_inference_mode_is_used_outside(original: Any) -> None:
    model, ids = converted(original), random_ids(1, 9)
    with torch.inference_mode():
        cache = hf.new_cache(model)
        model(ids[:, :8], past_key_values=cache)
    with torch.no_grad():
        got = model(ids[:, 8:], past_key_values=cache).logits
        close(got, original(ids, use_cache=False).logits[:, 8:])


def test_prompts_that_end_in_padding_are_refused(original: Any) -> None:
    model, ids = converted(original), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with pytest.raises(ValueError, match=r"E208[\s\S]*end in padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


@BOTH
def test_a_larger_vocabulary(original: Any, attention_only: bool) -> None:
    """Transformers raises for a token that the table of a hash router lacks; ops would read a wrong row."""
    model, other, ids = converted(original, attention_only), copy.deepcopy(original), random_ids(1, 9)
    for each in (model, other):
        torch.manual_seed(0)
        each.resize_token_embeddings(600, mean_resizing=False)
    new = torch.full((1, 1), 550)
    with pytest.raises((IndexError, ValueError), match=r"E208[\s\S]*embedding of 600|out of bounds"):
        model(torch.cat((ids, new), 1))
    for each in (model, other):
        router = each.model.layers[0].mlp.gate
        router.tid2eid = torch.cat((router.tid2eid, router.tid2eid[:88].flip(0)))
    ids = torch.cat((ids, new), 1)
    with torch.no_grad():
        model.model.dsv4_cache.reset()
        close(model(ids).logits, other(ids, use_cache=False).logits)


def test_convert_on_the_meta_device_by_context_is_refused(original: Any) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"E208[\s\S]*meta"):
        converted(original)
    assert not converted(original)(random_ids(1, 3)).logits.is_meta
