"""`hf.RunningBatch` of DeepSeek-V4.1 with drafts: each request gets the tokens that it gets alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.model.v41_causal_lm import V41ForCausalLM
from dsv4_compile.models.v41 import V41Format, V41Model, draft_steps, generate
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_draft_generate import DRAFTS
from tests.models.v41.test_running import BAD, SAMPLED, prompt

LONGEST = 64
SIZES: dict[str, Any] = {"slots": 3, "prefill_chunk": 17}


@pytest.fixture(scope="module")
def core() -> V41Model:
    """A layer of each kind, and two draft layers; the token `BAD` has logits of NaN."""
    core = tiny_model(drafts=DRAFTS, **KINDS)
    core.embed.weight.data[BAD] = math.nan
    core.head.weight.data[BAD] = 0
    return core


@pytest.fixture(scope="module")
def model(core: V41Model) -> Any:
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": LONGEST, "max_step_tokens": 17}
    return V41ForCausalLM(core, sizes | {"cache_format": V41Format.plain()})


def alone(core: V41Model, ids: list[int], new: int, **options: Any) -> list[int]:
    """Tokens of a request in caches of the batch's size."""
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": LONGEST, "cache_format": V41Format.plain()}
    defaults: dict[str, Any] = {"stop": [], "max_new_tokens": new, "caches": core.new_caches(**sizes)}
    return generate(core, [ids], **defaults | options)[0]


def known(texts: Any, correct: bool = False) -> Any:
    """A `propose` that drafts the text of each request by its last token, with any number of right drafts."""
    table = torch.zeros(LONGEST + 1, 64, 5, dtype=torch.int64)
    for ids, tokens in texts:
        text = [*ids, *tokens]
        for length in range(len(ids), len(text)):
            following = torch.tensor(text[length + 1 : length + 6], dtype=torch.int64)
            table[length, text[length], : len(following)] = following

    def propose(_: Any, anchors: Tensor, lengths: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        wrong = torch.arange(5) >= (lengths * 7 % 6)[:, None] + 5 * correct
        drafts = (table[lengths, anchors.clamp_min(0)] + wrong) % BAD
        return torch.where(anchors[:, None] >= 0, drafts, -1), torch.zeros(len(anchors), 5, 64)

    return propose


def nothing(_: Any, anchors: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.full((len(anchors), 5), -1), torch.zeros(len(anchors), 5, 64)


@pytest.fixture(scope="module")
def requests(core: V41Model) -> list[tuple[list[int], dict[str, Any], list[int]]]:
    """Prompts of a token to a slot, and their greedy texts; the longest ones fill their slots."""
    rng = random.Random(3)
    lengths = [1, 50, 18, 33, 2, 17]
    prompts, many = [prompt(length, i) for i, length in enumerate(lengths)], []
    texts = generate(core, prompts, max_new_tokens=14, stop=[], drafts=False, cache_format=V41Format.plain())
    for i, (ids, text) in enumerate(zip(prompts, texts, strict=True)):
        new = LONGEST - len(ids) if i == 1 else rng.randint(7, 12)
        options: dict[str, Any] = {"max_new_tokens": new, "stop_tokens": []}
        if i == 2:
            options["stop_tokens"] = [text[4]]
        if i in (3, 5):
            options |= SAMPLED | {"seed": 2**63 + i}
        if i in (4, 5):
            options["drafts"] = False
        many.append((ids, options, text[:new]))
    return many


@pytest.mark.parametrize(("graphs", "oracle"), [("off", False), ("standin", True)])
def test_requests_with_and_without_drafts_get_the_tokens_that_each_gets_alone(
    core: V41Model, model: Any, requests: Any, graphs: str, oracle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are refilled while others decode, and filled to their ends; stop tokens inside a block."""
    if oracle:
        monkeypatch.setattr(draft_steps, "propose", known([(ids, text) for ids, _, text in requests]))
    batch = hf.RunningBatch(model, graphs=graphs, **SIZES)
    submitted, dropped, returned = [], [], dict[int, list[int]]()
    for i, (ids, options, _) in enumerate(requests):
        submitted.append(batch.submit(ids, **options))
        if i % 4 == 1:
            dropped.append(batch.submit(prompt(30, i), max_new_tokens=30, stop_tokens=[]))
        for request, token in batch.step() if i % 2 else ():
            returned.setdefault(id(request), []).append(token)
    while not batch.idle:
        for request, token in batch.step():
            returned.setdefault(id(request), []).append(token)
        for request in dropped:
            if len(request.tokens) > 7:
                request.cancel()
    assert [request.state for request in dropped] == ["cancelled"] * 2
    for i, (request, (ids, options, text)) in enumerate(zip(submitted, requests, strict=True)):
        want, stop = text, options["stop_tokens"]
        if "temperature" in options:
            sampled = SAMPLED | {"seed": options["seed"]}
            with monkeypatch.context() as patch:
                if not options.get("drafts", True):
                    patch.setattr(draft_steps, "propose", nothing)
                want = alone(core, ids, options["max_new_tokens"], **sampled)
        elif stop:
            want = text[: text.index(stop[0]) + 1]
        assert request.tokens == returned[id(request)] == want, i
        assert request.state == ("stop" if stop else "length")
    statistics = [request.draft_statistics for request in (*submitted, *dropped)]
    assert statistics[1].tokens_per_step > 1.5 * oracle and statistics[4].tokens_per_step == 1
    assert sum(one.steps for one in statistics) == batch.draft_statistics.steps
    captures = batch.statistics.captures
    assert captures == (2 + 2 + 2 if graphs == "standin" else 0)  # steps of prompts, of tokens, and with drafts


def test_a_request_of_nan_and_a_step_that_raises_fail_their_requests_alone(
    model: Any, requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots full of NaN show nothing of it to the next request, nor do the drafts of the last one."""
    ids, options, text = requests[0]
    monkeypatch.setattr(draft_steps, "propose", known([(ids, text)], correct=True))
    batch = hf.RunningBatch(model, **SIZES)
    bad, late = batch.submit([5, BAD, 6], max_new_tokens=5), batch.submit([3, 4], max_new_tokens=9, stop_tokens=[])
    good = batch.submit(ids, **options)
    batch.step()
    for tensor in batch._steps.drafts._steps._state.rows:  # what a request before may leave
        tensor[:1].fill_(7)
    good_again = batch.submit(ids, **options)
    batch.run()
    assert bad.state == "failed" and isinstance(bad.error, DSV4Error) and bad.error.code == "E211"
    assert good.tokens == good_again.tokens == text and late.state == "length"
    assert good.draft_statistics.tokens_per_step > 3
    batch._steps.drafts._steps._state.rows.drafts.copy_(torch.tensor(text[1:6]))  # right ones, of nobody
    first = batch.submit(ids, **options)
    assert [len(batch.step()) for _ in range(2)] == [1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(batch._steps.drafts._steps, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    second = batch.submit(ids, **options)
    batch.run()
    assert first.state == "failed" and first.error.code == "E211" and second.tokens == text


def test_drafts_are_asked_for_in_words(core: V41Model, model: Any) -> None:
    plain = hf.RunningBatch(model, drafts=False, **SIZES)
    request = plain.submit([3, 4], max_new_tokens=3, stop_tokens=[], **SAMPLED)
    plain.run()
    assert request.tokens == alone(core, [3, 4], 3, drafts=False, **SAMPLED)
    assert plain.draft_statistics.steps == 0 and plain.caches.drafts is None
    without = tiny_model(**KINDS)
    for code, message, call in (
        ("E208", "a model without drafts", lambda: hf.RunningBatch(without, **SIZES, max_seq_len=32, drafts=True)),
        ("E201", "drafts='no'", lambda: hf.RunningBatch(model, **SIZES, drafts="no")),
        ("E204", "5 drafts", lambda: hf.RunningBatch(model, **SIZES, max_seq_len=4)),
        ("E201", "drafts=1", lambda: hf.RunningBatch(model, **SIZES).submit([1], max_new_tokens=1, drafts=1)),
    ):
        with pytest.raises(DSV4Error, match=message) as caught:
            call()
        assert caught.value.code == code
