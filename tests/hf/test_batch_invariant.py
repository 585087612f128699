"""The tiny model with `dsv4.batch_invariant`: the same bits alone and in any company. DSV4_LONG=1 runs 500 batches."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.ops.common.invariance import STEP_TOKENS
from dsv4_compile.testing import check_batch_invariant, invariant_models

LONG = bool(os.environ.get("DSV4_LONG"))
COMPOSITIONS = 500 if LONG else 8
MODE = {"dsv4.batch_invariant": "tokens"}
ONE = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "num_hash_layers": 0}
"""A layer with an indexer, which is quick to compile."""
SIZES: dict[str, Any] = {"slots": 4, "prefill_chunk": 48, "backend": "dsv4", "options": MODE}


def converted(drafts: str = "", max_batch_size: int = 8) -> Any:
    model = tiny_model(**({} if LONG else ONE))
    attached = tiny_drafts(model, drafts) if drafts else None
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": 256}
    return hf.convert(model, **sizes, attention_only=False, drafts=attached)


@pytest.fixture
def by_size(gemms_by_size: None) -> None:
    """Let each GEMM of torch that is left show itself."""


def test_a_running_batch_gives_each_request_the_logits_that_it_gets_alone(by_size: None) -> None:
    batch = hf.RunningBatch(converted(), **SIZES, graphs="standin")
    assert check_batch_invariant(batch, compositions=COMPOSITIONS).rows > 20 * COMPOSITIONS


def test_a_running_batch_without_the_option_is_seen(by_size: None) -> None:
    batch = hf.RunningBatch(converted(), slots=4, prefill_chunk=48)
    with pytest.raises(AssertionError, match=r"new token \d of request \d has other logits than alone"):
        check_batch_invariant(batch, compositions=3)


def test_a_model_whose_calls_depend_on_each_other_is_seen(by_size: None) -> None:
    with pytest.raises(AssertionError, match=r"composition 0.* token \d+ has other logits than alone; no op"):
        check_batch_invariant(converted(), compositions=1)


def test_a_model_compiled_with_step_is_checked_in_calls_of_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = converted(max_batch_size=32), []
    model.compile(backend="dsv4", options={"dsv4.batch_invariant": "step"})
    model._compiled_call_impl = model._call_impl  # what is called is watched, not compiled
    forward = model.forward

    def watched(input_ids: Any, **kwargs: Any) -> Any:
        sizes.append(input_ids.numel())
        return forward(input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    monkeypatch.setattr(invariant_models.torch, "equal", lambda got, want: True)
    check_batch_invariant(model, compositions=20)
    assert 200 < max(sizes) <= STEP_TOKENS


def test_a_copy_which_would_run_eager_is_refused() -> None:
    model = converted()
    model.compile(backend="dsv4", options=MODE)
    copied, ids = copy.deepcopy(model), torch.ones(1, 4, dtype=torch.int64)
    for call in (copied, functools.partial(copied.generate, max_new_tokens=1)):
        with pytest.raises(DSV4Error, match=r"(?s)E303.*a copy of a model.*same options"):
            call(ids)
    copied.compile(backend="dsv4")
    copied._compiled_call_impl = copied._call_impl
    copied(ids)


def test_a_model_is_compiled_as_one_graph() -> None:
    model = converted()
    with pytest.raises(DSV4Error, match=r"(?s)E303.*fullgraph=False.*runs eager"):
        model.compile(backend="dsv4", fullgraph=False, options=MODE)
    assert model._compiled_call_impl is None
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        patch.setattr(torch, "compile", lambda *args, fullgraph=False, **kwargs: seen.append(fullgraph))
        for options in ({}, {"dsv4.batch_invariant": "off"}, {"dsv4.batch_invariant": "step"}, MODE):
            model.compile(backend="dsv4", options=options)
    assert seen == [False, False, True, True]


if LONG:  # these compile for minutes

    @pytest.mark.parametrize("kind", ["dspark", "mtp"])
    def test_a_running_batch_with_drafts_gives_each_request_the_tokens_that_it_gets_alone(kind: str) -> None:
        check_batch_invariant(hf.RunningBatch(converted(kind), **SIZES, graphs="standin"), compositions=COMPOSITIONS)

    @pytest.mark.parametrize("level", ["step", "tokens"])
    def test_a_compiled_model_gives_each_token_the_logits_that_it_gets_alone(level: str) -> None:
        model = converted()
        model.compile(fullgraph=True, backend="dsv4", options=MODE | {"dsv4.batch_invariant": level})
        check_batch_invariant(model, compositions=COMPOSITIONS)
