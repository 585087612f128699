"""Tests of RunningBatch with drafts: each request gets the text that it gets without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import quiet_libraries, tiny_drafts, tiny_model
from tests.hf.serving import BAD_TOKEN, SAMPLED, alone, damaged, prompt
from tests.hf.small import LAYERS
from tests.support.draft_sources import Arbitrary, Biased, Known, Source

SIZES: dict[str, Any] = {"slots": 3, "prefill_chunk": 48}


@pytest.fixture(scope="module")
def model() -> Any:
    quiet_libraries()
    return hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=256)


@pytest.fixture(scope="module")
def attached() -> Any:
    target = tiny_model(**LAYERS)
    return hf.convert(target, max_batch_size=1, max_seq_len=256, drafts=tiny_drafts(target))


@pytest.fixture(autouse=True)
def without_drafts_after(model: Any) -> Iterator[None]:
    yield
    model.__dict__["dsv4_drafts"] = None


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of one token to nearly a slot, in chunks of 48; greedy and sampled."""
    rng = random.Random(4)
    lengths = [1, 3, 20, 200, rng.randint(40, 60), 100, 7, 245]
    many = [(prompt(n, i), {"max_new_tokens": min(rng.randint(9, 22), 256 - n)}) for i, n in enumerate(lengths)]
    for i in (2, 5):
        many[i][1].update(SAMPLED, seed=i)
    return many


@pytest.fixture(scope="module")
def texts(model: Any, requests: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    """Tokens of each request in a batch without drafts."""
    batch = hf.RunningBatch(model, **SIZES, drafts=False)
    submitted = [batch.submit(ids, **options) for ids, options in requests]
    batch.run()
    return [request.tokens for request in submitted]


def known(requests: Any, texts: list[list[int]]) -> Known:
    return Known([ids + text for (ids, _), text in zip(requests, texts, strict=True)])


@pytest.mark.parametrize("graphs", ["off", "standin"])
def test_requests_through_three_slots_get_their_text_with_any_acceptance(
    graphs: str, model: Any, requests: Any, texts: list[list[int]]
) -> None:
    """Slots are refilled while others decode; the longest request ends at the end of its slot."""
    model.__dict__["dsv4_drafts"] = known(requests, texts)
    batch = hf.RunningBatch(model, **SIZES, graphs=graphs)
    submitted = [batch.submit(ids, **options) for ids, options in requests]
    returned: dict[int, list[int]] = {}
    steps = 0
    while not batch.idle:
        steps += 1
        for request, token in batch.step():
            returned.setdefault(id(request), []).append(token)
    for request, (_, options), text in zip(submitted, requests, texts, strict=True):
        assert returned[id(request)] == request.tokens and len(request.tokens) == len(text)
        assert request.tokens == text or "temperature" in options
    assert sum(r.draft_statistics.steps for r in submitted) == batch.draft_statistics.steps
    assert batch.draft_statistics.tokens_per_step > 2 and steps < 60
    assert submitted[3].draft_statistics.tokens_per_step > 2 and len(submitted[3].draft_statistics.acceptance) == 5
    if graphs == "standin":
        assert batch.statistics.captures == 1 + 3 + 1 and batch.statistics.uncaptured == 0  # prompts, slots, drafts


def test_the_draft_layers_of_a_model_change_no_text(attached: Any, requests: Any, texts: list[list[int]]) -> None:
    batch = hf.RunningBatch(attached, **SIZES)
    submitted = [batch.submit(ids, **options) for ids, options in requests]
    batch.run()
    for request, (_, options), text in zip(submitted, requests, texts, strict=True):
        assert request.tokens == text or "temperature" in options
    plain = hf.RunningBatch(attached, **SIZES, drafts=False)
    request = plain.submit(requests[0][0], **requests[0][1])
    plain.run()
    assert request.tokens == texts[0]
    assert plain.draft_statistics.steps == request.draft_statistics.steps == 0 < batch.draft_statistics.steps


@pytest.mark.parametrize("source", [Arbitrary(), Biased()], ids=["one-hot", "with logits"])
def test_a_sampled_request_gets_the_same_text_in_any_company(source: Source, model: Any) -> None:
    model.__dict__["dsv4_drafts"] = source
    options = {"max_new_tokens": 14, "temperature": 1.2, "top_k": 40, "seed": 2**63 + 5}
    want = alone(model, prompt(30), **options)
    batch = hf.RunningBatch(model, **SIZES)
    others = [batch.submit(prompt(n, n), max_new_tokens=5, **SAMPLED, seed=n) for n in (9, 80)]
    request = batch.submit(prompt(30), **options)
    batch.step()
    others[0].cancel()
    batch.submit(prompt(60), max_new_tokens=3)
    batch.run()
    assert request.tokens == want and len(set(want)) > 5


def test_requests_without_drafts_run_beside_those_with(model: Any, requests: Any, texts: list[list[int]]) -> None:
    model.__dict__["dsv4_drafts"] = known(requests, texts)
    batch = hf.RunningBatch(model, **SIZES)
    (ids, options), text = requests[0], texts[0]
    with_drafts, without = batch.submit(ids, **options), batch.submit(ids, **options, drafts=False)
    batch.run()
    assert with_drafts.tokens == without.tokens == text
    assert with_drafts.draft_statistics.tokens_per_step > 2 and without.draft_statistics.tokens_per_step == 1


@pytest.mark.parametrize("at", [1, 3, 4, 8])
def test_fault_9_a_stop_token_inside_a_block_ends_the_request(
    at: int, model: Any, requests: Any, texts: list[list[int]]
) -> None:
    model.__dict__["dsv4_drafts"] = known(requests, texts)
    (ids, options), text = requests[0], texts[0]
    batch = hf.RunningBatch(model, **SIZES)
    seen: list[int] = []
    request = batch.submit(ids, **options, stop_tokens=[text[at]], on_token=seen.append)
    batch.run()
    assert request.tokens == seen == text[: text.index(text[at]) + 1] and request.state == "stop"


@pytest.mark.parametrize("raises", [True, False])
def test_a_callback_ends_its_request_at_its_token_inside_a_block(
    raises: bool, model: Any, requests: Any, texts: list[list[int]]
) -> None:
    """Tokens of the same step that follow are dropped, even if the last of them had ended the request."""
    model.__dict__["dsv4_drafts"] = known(requests, texts)
    (ids, options), text = requests[0], texts[0]
    for last in (len(text) - 1, 4):
        batch = hf.RunningBatch(model, **SIZES)
        seen: list[int] = []
        submitted: list[Any] = []

        def take(token: int, last: int = last, seen: list[int] = seen, submitted: list[Any] = submitted) -> None:
            seen.append(token)
            if len(seen) == last:
                if raises:
                    raise KeyError(token)
                submitted[0].cancel()

        submitted += [batch.submit(ids, **options, on_token=take), batch.submit(ids, **options)]
        new = []
        while not batch.idle:
            try:
                new += batch.step()
            except KeyError as fault:
                assert fault.args == (text[last - 1],)
        assert submitted[0].tokens == seen == text[:last] and submitted[0].state == "cancelled"
        assert isinstance(submitted[0].error, KeyError) == raises
        assert submitted[1].tokens == text and submitted[1].state == "length"
        if not raises:
            assert [token for request, token in new if request is submitted[0]] == seen


def test_a_request_of_nan_fails_alone() -> None:
    model = damaged()
    text = alone(model, prompt(20, vocab=500), max_new_tokens=12)
    model.__dict__["dsv4_drafts"] = known([(prompt(20, vocab=500), {})], [text])
    batch = hf.RunningBatch(model, **SIZES)
    good = batch.submit(prompt(20, vocab=500), max_new_tokens=12)
    bad = batch.submit([5, 6, BAD_TOKEN], max_new_tokens=12)
    batch.run()
    assert good.tokens == text and good.state == "length"
    assert bad.state == "failed" and isinstance(bad.error, DSV4Error) and bad.error.code == "E211"


def test_a_step_that_raises_fails_its_requests_and_the_next_ones_run(
    model: Any, requests: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.__dict__["dsv4_drafts"] = known(requests, texts)
    batch = hf.RunningBatch(model, **SIZES)
    (ids, options), text = requests[0], texts[0]
    first = batch.submit(ids, **options)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch._steps.drafts.drafting, "finish_step", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    second = batch.submit(ids, **options)
    batch.run()
    assert first.state == "failed" and first.error.code == "E211" and second.tokens == text


def test_drafts_are_asked_for_in_words(model: Any) -> None:
    with pytest.raises(DSV4Error, match="drafts=True for a model without drafts"):
        hf.RunningBatch(model, slots=1, drafts=True)
    with pytest.raises(DSV4Error, match="drafts='no'"):
        hf.RunningBatch(model, slots=1, drafts="no")
    with pytest.raises(DSV4Error, match="drafts=1"):
        hf.RunningBatch(model, slots=1).submit([1], max_new_tokens=1, drafts=1)
