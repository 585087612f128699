"""Tests of taps of the target's streams, and of draft layers that are attached, copied, cast and detached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.model.taps import Taps
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from tests.hf.drafting import NOISE, SIZE, N, close, drafting, formulas, inject, metadata_of, propose, spoil, taps_of
from tests.hf.small import LAYERS, random_ids

# Taps.


@torch.no_grad()
def test_taps_are_the_completed_streams_after_layers() -> None:
    """The last layer included, before its streams enter the head; of eager transformers' recorded hidden states."""
    original = tiny_model()
    ids = random_ids(2, 40)
    want = original(ids, output_hidden_states=True, use_cache=False).hidden_states
    model = hf.convert(copy.deepcopy(original), max_batch_size=2, max_seq_len=256)
    model.model.adopt()
    caches = model.model.dsv4_cache.paged.layers
    plain = model.model.run_layers(ids, metadata_of(model, 2, 40), caches)
    for layers in ((2, 3), (3,), (3, 0, 1)):
        normed, taps = model.model.run_layers(ids, metadata_of(model, 2, 40), caches, taps=Taps(layers))
        assert torch.equal(normed, plain)
        parts = taps.view(80, len(layers), SIZE).unbind(1)
        for layer, tap in zip(layers[:], parts, strict=True):
            if layer < 3:  # transformers records the last one after the head
                close(tap, want[layer + 1].mean(2).flatten(0, 1))
        _, streams = model.model.run_layers(ids, metadata_of(model, 2, 40), caches, taps=Taps((3,), mean=False))
        close(streams.view(80, 4, SIZE).mean(1), parts[layers.index(3)])


# Attachment.


def test_weights_that_are_replaced_after_convert_take_effect() -> None:
    model = drafting("dspark", stages=2)
    taps = taps_of(model, 20)

    def logits() -> Tensor:
        inject(model, taps, 0, 0)
        return propose(model, [3], [20])[1]

    close(logits()[0, 0], formulas(model).markov(formulas(model).dspark(taps, 3, NOISE, N)[1][:1], [3])[0])
    drafts = model.dsv4_drafts
    attention = drafts.model.layers[1].self_attn
    for module in (attention.kv_proj, attention.q_b_proj, drafts.main_proj, drafts.model.layers[0].mlp.gate):
        before = logits()
        module.weight = torch.nn.Parameter(torch.randn_like(module.weight) * 0.1, requires_grad=False)
        assert not torch.equal(logits(), before)
        want = formulas(model)
        close(logits()[0, 0], want.markov(want.dspark(taps, 3, NOISE, N)[1][:1], [3])[0])
    model.model.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    model.model.embed_tokens.weight.data.mul_(-1)
    want = formulas(model)
    close(logits()[0, 0], want.markov(want.dspark(taps, 3, NOISE, N)[1][:1], [3])[0])
    attention.kv_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(DSV4Error, match="E208"):
        logits()


def test_copies_have_drafts_of_their_own(mtp: Any) -> None:
    taps, ids = taps_of(mtp, 20), random_ids(20)
    inject(mtp, taps, 0, 0, ids)
    want = propose(mtp, [3], [20])
    twin = copy.deepcopy(mtp)
    assert twin.dsv4_drafts.target is twin and twin.dsv4_drafts is not mtp.dsv4_drafts
    assert twin.dsv4_drafts.model.embed_tokens is twin.model.embed_tokens
    close(propose(twin, [3], [20])[1], want[1])
    spoil(mtp)
    twin.dsv4_drafts.e_proj.weight.data.zero_()
    assert mtp.dsv4_drafts.e_proj.weight.abs().sum() > 0
    inject(twin, taps, 0, 0, ids)
    close(propose(twin, [3], [20])[1][0], formulas(twin).mtp(taps.view(20, 4, SIZE), [*ids[:-1].tolist(), 3], 3))


def test_revert_detaches_drafts_that_can_be_attached_again() -> None:
    model = drafting("dspark", stages=2)
    drafts, names = model.dsv4_drafts, list(model.dsv4_drafts.state_dict())
    taps = taps_of(model, 20)
    inject(model, taps, 0, 0)
    want = propose(model, [3], [20])
    assert not any("dsv4" in name or "embed" in name for name in names)
    assert not any("draft" in name or "mtp" in name for name in model.state_dict())
    with pytest.raises(DSV4Error, match="E208"):
        hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=256, drafts=drafts)
    hf.revert(model)
    assert getattr(model, "dsv4_drafts", None) is None and drafts.target is None
    with pytest.raises(DSV4Error, match="E208"):
        drafts.propose(*[torch.zeros(1, dtype=torch.int64)] * 4)
    hf.convert(model, max_batch_size=1, max_seq_len=256, drafts=drafts)
    assert list(drafts.state_dict()) == names
    inject(model, taps, 0, 0)
    close(propose(model, [3], [20])[1], want[1])


def test_drafts_of_another_model_are_refused_and_nothing_changes() -> None:
    model, other = tiny_model(**LAYERS), tiny_model(**LAYERS, hidden_size=64)
    kinds = [type(module) for module in model.modules()]
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("hidden_size", tiny_drafts(other), {}),
        ("Linear", torch.nn.Linear(2, 2), {}),
        ("layers", tiny_drafts(tiny_model()), {}),
        ("E204", tiny_drafts(model), {"max_step_tokens": N}),
    ]
    for words, drafts, options in refused:
        with pytest.raises(DSV4Error, match=words):
            hf.convert(model, max_batch_size=1, max_seq_len=256, drafts=drafts, **options)
        assert [type(module) for module in model.modules()] == kinds
        assert getattr(drafts, "target", None) is None
    hooked = tiny_drafts(model)
    hooked.model.layers[0].self_attn.kv_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(DSV4Error, match="E208"):
        hf.convert(model, max_batch_size=1, max_seq_len=256, drafts=hooked)
    assert [type(module) for module in model.modules()] == kinds


def test_a_cast_casts_the_drafts_too(dspark: Any) -> None:
    model = copy.deepcopy(dspark)
    taps = taps_of(model, 20)
    model.double().float()
    inject(model, taps, 0, 0)
    want = formulas(model)
    close(propose(model, [3], [20])[1][0, 0], want.markov(want.dspark(taps, 3, NOISE, N)[1][:1], [3])[0])
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.dsv4_drafts.parameters()} == {torch.bfloat16}
    model.to("meta")
    with pytest.raises(DSV4Error, match="E208"):
        inject(model, taps, 0, 0)
