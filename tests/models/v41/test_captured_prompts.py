"""Captured steps of prompts: padded tokens and padded tails give what the model gives, in every mode and chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dsv4_compile.errors import DSV4Error, GraphError
from dsv4_compile.models.v41 import CompiledSteps, Tail, V41Caches, V41Format, V41Model, compile, prefill
from dsv4_compile.models.v41.prefill import MODES
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.testing import assert_bitwise
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

BUCKETS = [4, 12, 33]
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(**KINDS)


@pytest.fixture(scope="module")
def steps(model: V41Model) -> CompiledSteps:
    """The plain model's, replayed."""
    return compile(model, caches=caches_of(model), backend=None, graphs="standin", prompt_buckets=BUCKETS)


def caches_of(model: V41Model, step: int = 11) -> V41Caches:
    sizes = {"max_batch_size": 3, "max_seq_len": 64, "max_step_tokens": step}
    return model.new_caches(cache_format=V41Format.plain(), **sizes)


def prompts() -> list[Tensor]:
    ids = token_ids()
    return [torch.cat([ids, ids])[:45], ids[5:12], ids[:1]]


def test_padded_rows_and_tails_change_no_cache_and_no_logits(model: V41Model) -> None:
    """GEMMs of other sizes sum in other orders, so values are close; dirty caches change no bit of a padded step."""
    count, size, on_tail = 11, 20, 4
    ids, requests = token_ids()[:count], torch.zeros(count).long()
    rows, first = torch.arange(count - on_tail, count), torch.full((on_tail,), count - on_tail)
    plain, padded, dirty = (caches_of(model) for _ in range(3))
    for tensor in dirty.tensors():
        tensor.fill_(7)
    last, missing = torch.tensor([on_tail - 1, 0]), size - count
    inputs = ids, torch.arange(count), requests
    more = [pad(values, (0, missing), value=value) for values, value in zip(inputs, (3, -1, -1), strict=True)]
    with torch.no_grad():
        want = model(*inputs, plain, tail=Tail(rows, first), last=last)
        tail = Tail(*(pad(values, (0, size - on_tail), value=-1) for values in (rows, first)))
        got = [model(*more, caches, tail=tail, last=last) for caches in (padded, dirty)]
    torch.testing.assert_close(got[0], want, **CLOSE)
    assert_bitwise(got[0], got[1])
    for after, before in zip(padded.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(after, before, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_replayed_prompts_are_those_of_the_model(model: V41Model, steps: CompiledSteps, mode: str) -> None:
    assert steps.statistics.captures == 2 * len(BUCKETS) + 2
    for chunk in (11, 3):
        before, caches = steps.statistics.replays, caches_of(model)
        want = prefill(model, prompts(), caches, chunk=chunk, mode=mode)
        got = prefill(model, prompts(), steps.caches, chunk=chunk, mode=mode, forward=steps)
        torch.testing.assert_close(got, want, **CLOSE)
        assert steps.statistics.replays > before
        for length in (45, 52):  # the next turn of a request after a replayed prompt
            turn = {"requests": [0], "starts": [length], "mode": mode}
            want = prefill(model, prompts()[1:2], caches, **turn)
            torch.testing.assert_close(
                prefill(model, prompts()[1:2], steps.caches, forward=steps, **turn), want, **CLOSE
            )


def test_steps_without_a_graph_run_as_before(model: V41Model, steps: CompiledSteps) -> None:
    """Logits of more rows than requests, and more tokens than the largest bucket."""
    assert steps.prompts is not None
    before, ids = steps.prompts.statistics.replays, token_ids()[:11]
    inputs = ids, torch.arange(11), torch.zeros(11).long()
    with torch.no_grad():
        want = model(*inputs, caches_of(model))
    torch.testing.assert_close(steps(*inputs, steps.caches), want, **CLOSE)
    assert steps.prompts.statistics.replays == before and not steps.prompts.fits(34)
    assert steps.prompts.fits(33, 3) and not steps.prompts.fits(33, 4)
    off = compile(model, caches=steps.caches, backend=None, graphs="standin", prompt_buckets=[])
    assert off.prompts is None and off.captured is not None
    for buckets, code in (([34], "E204"), ("8", "E204"), ([1], "E204")):
        with pytest.raises(DSV4Error) as caught:
            compile(model, caches=steps.caches, backend=None, graphs="standin", prompt_buckets=buckets)  # type: ignore[arg-type]
        assert caught.value.code == code


def test_a_replaced_weight_is_found_before_a_prompt() -> None:
    model: Any = tiny_model(**KINDS)
    steps = compile(model, caches=caches_of(model), backend=None, graphs="standin", prompt_buckets=[4])
    model.layers[1].attn.wkv.weight = nn.Parameter(torch.zeros_like(model.layers[1].attn.wkv.weight), False)
    with pytest.raises(GraphError, match="E421"):
        steps.check_captured()
