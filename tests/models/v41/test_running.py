"""`hf.RunningBatch` of DeepSeek-V4.1: each request gets the tokens that `generate` gives it alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error, GraphError
from dsv4_compile.models.v41 import V41Model, generate
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS

SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
SIZES: dict[str, Any] = {"slots": 4, "max_seq_len": 96, "prefill_chunk": 24}
BAD = 63
"""Token with an embedding of NaN, which no good prompt has and no step chooses."""


@pytest.fixture(scope="module")
def model() -> V41Model:
    model = tiny_model(**KINDS)
    model.embed.weight.data[BAD] = math.nan
    model.head.weight.data[BAD] = 0
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(BAD) for _ in range(length)]


def alone(model: V41Model, request: Any, **options: Any) -> list[int]:
    stop = sorted(request.stop_tokens)
    return generate(model, [request.prompt], max_new_tokens=request.max_new_tokens, stop=stop, **options)[0]


@pytest.mark.parametrize(("graphs", "backend"), [("off", "eager"), ("standin", None)])
def test_many_requests_through_few_slots_get_the_tokens_that_each_gets_alone(
    model: V41Model, graphs: str, backend: str | None
) -> None:
    rng = random.Random(5)
    batch, requests = hf.RunningBatch(model, graphs=graphs, backend=backend, **SIZES), []
    dropped: list[Any] = []
    for i in range(11):
        length = rng.choice([1, 2, rng.randint(3, 30), rng.randint(40, 80)])
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 12)}
        sampling = SAMPLED | {"seed": i} if i % 5 == 0 else {}
        stop = [*rng.sample(range(BAD), 5)]
        requests.append((batch.submit(prompt(length, i), stop_tokens=stop, **options, **sampling), sampling))
        if i % 7 == 3:
            dropped.append(batch.submit(prompt(60, i), max_new_tokens=30, stop_tokens=[]))
        for refused in ([], [64], [-1], prompt(96)):
            with pytest.raises(ValueError, match=r"E20[14]"):
                batch.submit(refused, max_new_tokens=10)
        if i % 3 == 0:
            batch.step()
    most = 0
    while not batch.idle:
        with torch.compiler.set_stance("fail_on_recompile"):
            batch.step()
        most = max(most, len(batch.running))
        victim = next((request for request in dropped if not request.ended and request.state != "waiting"), None)
        if victim is not None and rng.random() < 0.4:
            victim.cancel()
    assert most == SIZES["slots"] and {request.state for request in dropped} <= {"cancelled", "length"}
    for request, sampling in requests:
        assert request.tokens == alone(model, request, **sampling), request
        assert request.state == ("stop" if request.tokens[-1] in request.stop_tokens else "length")
    assert (batch.statistics.replays > 0) == (graphs == "standin")
    assert batch.statistics.captures == (3 + 2 if graphs == "standin" else 0)  # of steps, and of prompts


@pytest.mark.parametrize("graphs", ["off", "standin"])
def test_a_prompt_of_nan_fails_alone_and_leaves_nothing(model: V41Model, graphs: str) -> None:
    batch = hf.RunningBatch(model, graphs=graphs, **SIZES | {"slots": 2})
    bad = batch.submit([*prompt(30), BAD, *prompt(9)], max_new_tokens=5)
    good = [batch.submit(prompt(n), max_new_tokens=8, stop_tokens=[]) for n in (33, 5, 21)]
    batch.run()
    assert bad.state == "failed" and isinstance(bad.error, DSV4Error) and bad.error.code == "E211"
    for request in good:
        assert request.tokens == alone(model, request)


def test_a_slot_shows_nothing_of_the_request_before(model: V41Model) -> None:
    batch = hf.RunningBatch(model, graphs="standin", **SIZES | {"slots": 1})
    for length in (80, 3, 41, 1):
        for tensor in batch.caches.tensors():
            tensor.view(torch.uint8).fill_(255) if tensor.element_size() == 1 else tensor.fill_(-1)
        request = batch.submit(prompt(length), max_new_tokens=5, stop_tokens=[])
        assert list(request) == request.tokens == alone(model, request)


def test_a_slot_is_filled_to_its_last_token(model: V41Model) -> None:
    batch = hf.RunningBatch(model, **SIZES | {"max_seq_len": 33, "prefill_chunk": 7})
    requests = [batch.submit(prompt(n), max_new_tokens=33 - n, stop_tokens=[]) for n in (32, 1, 20)]
    with pytest.raises(ValueError, match="E204"):
        batch.submit(prompt(20), max_new_tokens=14)
    batch.run()
    for request in requests:
        assert len(request.tokens) == request.max_new_tokens
        assert request.tokens == alone(model, request)


def test_stop_tokens_of_the_configuration_end_requests(model: V41Model) -> None:
    batch = hf.RunningBatch(model, **SIZES)
    assert batch.submit([1], max_new_tokens=1).stop_tokens == frozenset(model.config.eos_token_id)


def test_weights_are_compared_where_requests_join() -> None:
    model = tiny_model(**KINDS)
    batch = hf.RunningBatch(model, graphs="standin", **SIZES)
    wkv = model.layers[1].attn.wkv
    wkv.weight = nn.Parameter(wkv.weight * 2, requires_grad=False)
    batch.submit([1, 2], max_new_tokens=2)
    with pytest.raises(GraphError, match=r"layers\.1\.attn\.wkv\.weight"):
        batch.step()
    eager = hf.RunningBatch(model, **SIZES)
    request = eager.submit([1, 2], max_new_tokens=2, stop_tokens=[])
    eager.run()
    assert request.tokens == alone(model, request)


def test_batches_that_cannot_run_are_refused(model: V41Model) -> None:
    def refused(code: str, **changes: Any) -> None:
        with pytest.raises(DSV4Error) as caught:
            hf.RunningBatch(model, **SIZES | changes)
        assert caught.value.code == code, caught.value

    refused("E201", max_seq_len=None)
    refused("E204", max_seq_len=0)
    refused("E204", slots=0)
    refused("E204", prefill_chunk=1)
    refused("E208", drafts=True)
    refused("E301", backend="nobody")
    refused("E301", options={"dsv4.strict": "off"})
    refused("E420", graphs="cuda")
    refused("E420", graphs="trees")
    batch = hf.RunningBatch(model, **SIZES)
    request = batch.submit([1, 2], max_new_tokens=2)
    model.train()
    refused("E208")
    with pytest.raises(DSV4Error, match="training mode"):
        batch.step()
    model.eval()
    batch.run()
    assert request.state in ("length", "stop")
