"""Generation with drafts: the text is that without, whatever is drafted and however many drafts are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.layout import V41_ENTRY_BLOCK, V41_WINDOW_BLOCK
from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, draft_steps, generate, prefill
from dsv4_compile.models.v41.draft_captured import DraftSteps
from dsv4_compile.models.v41.draft_steps import verify
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_model
from dsv4_compile.reference.common.paging import lookup_slots
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

DRAFTS = replace(TINY_DRAFTS, stages=2, taps=(2, 3))
PLAIN = V41Format.plain()
GREEDY = (0.0, 0.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def model() -> V41Model:
    """A layer of each kind, and two draft layers."""
    return tiny_model(drafts=DRAFTS, **KINDS)


def text(model: V41Model, prompts: Any, **options: Any) -> list[list[int]]:
    defaults: dict[str, Any] = {"max_new_tokens": 9, "stop": []}
    if "caches" not in options:
        defaults["cache_format"] = PLAIN
    return generate(model, prompts, **defaults | options)


def prompts_of(draw: random.Random) -> list[Tensor]:
    return [token_ids(80).roll(draw.randrange(60))[: draw.randint(1, 60)] for _ in range(draw.randint(1, 3))]


Propose = Callable[..., tuple[Tensor, Tensor]]


def oracle(model: V41Model, texts: dict[int, list[int]], wrong_at: Callable[[int], int]) -> Propose:
    """Drafts of a greedy text that is known for each request, by position, wrong from `wrong_at(position)` on."""

    def propose(_: Any, anchors: Tensor, lengths: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        drafts = torch.full((len(anchors), 5), -1)
        for row, (anchor, length) in enumerate(zip(anchors.tolist(), lengths.tolist(), strict=True)):
            if anchor >= 0:
                following = (texts[row][length + 1 : length + 6] + [0] * 5)[:5]
                wrong = wrong_at(length)
                drafts[row] = torch.tensor([(t + (i >= wrong)) % 64 for i, t in enumerate(following)])
        return drafts, torch.zeros(len(anchors), 5, 64)

    return propose


@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_same(model: V41Model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd chunks, stop tokens and budgets inside a block; drafts of the model, and some with any acceptance."""
    draw = random.Random(seed)
    prompts, new, mode = prompts_of(draw), draw.randint(4, 14), draw.choice(("full", "tail", "replay"))
    long = text(model, prompts, drafts=False, max_new_tokens=new + 6, mode=mode)
    assert model.draft_statistics is None
    stop = draw.choices([token for tokens in long for token in tokens], k=draw.randint(0, 2))
    ends = [next((i + 1 for i, token in enumerate(tokens) if token in stop), new) for tokens in long]
    plain = [tokens[: min(end, new)] for tokens, end in zip(long, ends, strict=True)]
    options: dict[str, Any] = {"max_new_tokens": new, "stop": stop, "mode": mode}
    assert text(model, prompts, chunk=draw.choice((3, 7, 20)), **options) == plain
    assert model.draft_statistics is not None
    texts = {i: [*prompt.tolist(), *tokens] for i, (prompt, tokens) in enumerate(zip(prompts, long, strict=True))}
    for wrong_at in (lambda _: 5, lambda position: position * 7 % 6):
        monkeypatch.setattr(draft_steps, "propose", oracle(model, texts, wrong_at))
        assert text(model, prompts, drafts=True, **options) == plain
        statistics = model.draft_statistics
        assert new < 9 or stop or statistics.tokens_per_step > 2


@pytest.mark.parametrize("drafted", [-1, 63, 64, 2**40])
def test_sabotaged_drafts_give_the_same_text(model: V41Model, drafted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [token_ids(19), token_ids(7).flip(0)]
    plain = text(model, prompts, drafts=False)

    def propose(_: Any, anchors: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return torch.full((len(anchors), 5), drafted), torch.full((len(anchors), 5, 64), torch.nan)

    monkeypatch.setattr(draft_steps, "propose", propose)
    assert text(model, prompts) == plain


def test_a_request_is_filled_to_the_last_row_of_its_caches(model: V41Model) -> None:
    prompts = [token_ids(20), token_ids(13)]
    plain = text(model, prompts, drafts=False, max_new_tokens=12)
    caches = model.new_caches(max_batch_size=2, max_seq_len=32, cache_format=PLAIN)
    assert text(model, prompts, caches=caches, max_new_tokens=12) == plain
    assert text(model, prompts[1:], caches=caches, max_new_tokens=19)[0][:12] == plain[1]


def committed(caches: V41Caches, request: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Rows, flat, of each cache that a request of `length` tokens needs later: cache and int64 numbers of rows."""
    rows, one = [], torch.tensor(request)
    window = lookup_slots(caches.window_table, one, torch.arange(max(0, length - 7), length), V41_WINDOW_BLOCK)
    rows += [(tensor.flatten(0, 1), window) for tensor in caches.windows]
    for layer, source in caches.sources.items():
        ratio = caches.config.ratio(layer)
        slots = lookup_slots(caches.entry_tables[ratio], one, torch.arange(length // ratio), V41_ENTRY_BLOCK)
        rows += [(source.entries.flatten(0, 1), slots), (source.keys.flatten(0, 1), slots)]
        if source.state is not None:
            open_token = torch.tensor([length - 1] if length % 2 else [], dtype=torch.int64)
            rows.append((source.state.flatten(0, 1), request * source.state.shape[1] + open_token % 8))
    for history in caches.histories.values():
        back = torch.arange(max(0, length - 3), length) % history.shape[1]
        rows.append((history.flatten()[:, None], request * history.shape[1] + back))
    if caches.drafts is not None:
        context = torch.arange(max(0, length - 8), length)
        slots = lookup_slots(caches.drafts.window_table, one, context, V41_WINDOW_BLOCK)
        rows += [(tensor.flatten(0, 1), slots) for tensor in caches.drafts.windows]
    return rows


def soiled(caches: V41Caches, lengths: list[int]) -> None:
    """Fill all rows of caches that no request needs with NaN, and ids of n-grams with a different one."""
    needed = [committed(caches, request, length) for request, length in enumerate(lengths)]
    for parts in zip(*needed, strict=True):
        cache = parts[0][0]
        keep = torch.zeros(len(cache), dtype=torch.bool)
        keep[torch.cat([slots for _, slots in parts])] = True
        cache[~keep] = torch.nan if cache.is_floating_point() else 11


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 31, 32])
def test_any_acceptance_leaves_the_caches_of_plain_decoding(model: V41Model, length: int) -> None:
    """Requests that accept 0 to 5 drafts; the lengths meet borders of the window, its ring and both ratios."""
    sizes: dict[str, Any] = {"max_batch_size": 6, "max_seq_len": 64, "max_step_tokens": 6, "cache_format": PLAIN}
    prompt = token_ids(40).roll(length)[:length].tolist()
    plain, caches = model.new_caches(**sizes), model.new_caches(**sizes)
    first = prefill(model, [prompt] * 6, plain).argmax(1)
    prefill(model, [prompt] * 6, caches)
    tokens, logits = [first], []
    for step in range(7):  # plain decoding of all requests, which are the same
        logits.append(model(tokens[-1], torch.full((6,), length + step), torch.arange(6), plain)[0])
        tokens.append(logits[-1].argmax().expand(6))
    greedy = torch.stack(tokens, 1)[0].tolist()
    steps = DraftSteps(model, caches, verify)
    numbers = torch.tensor([GREEDY] * 6, dtype=torch.float64)
    steps.load(first, torch.full((6,), length), numbers, torch.zeros(6, dtype=torch.int64))
    rows = steps._loaded.rows
    rows.drafts.copy_(torch.tensor(greedy[1:6]).repeat(6, 1))
    rows.drafts[range(5), range(5)] += torch.where(rows.drafts[range(5), range(5)] < 63, 1, -1)
    got = steps.step()
    assert got[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    lengths = rows.lengths.tolist()
    assert lengths == [length + k + 1 for k in range(6)]
    for row, now in enumerate(lengths):
        assert got[row, 1 : row + 2].tolist() == greedy[1 : row + 2]
        again = model.new_caches(**sizes)  # the plain ones have run on: their windows hold later rows
        prefill(model, [prompt + greedy[: now - length]], again, requests=[row])
        for (cache, slots), (want, _) in zip(committed(caches, row, now), committed(again, row, now), strict=True):
            torch.testing.assert_close(cache[slots], want[slots], rtol=0, atol=1e-4)
    soiled(caches, lengths)
    run = model.logits(*rows.tokens(), caches).view(6, 6, -1)
    for row, now in enumerate(lengths):
        torch.testing.assert_close(run[row, 0], logits[now - length], rtol=0, atol=1e-4)
    assert run.isfinite().all()
    soiled(caches, lengths)
    assert steps.step()[:, 1].tolist() == [greedy[row + 2] for row in range(6)]
    assert rows.draft_logits.isfinite().all()


@torch.no_grad()
def test_samples_have_the_distribution_of_the_target(model: V41Model) -> None:
    """Chi-square of the tokens that a first step chooses, and of those of a second one after the commonest of them."""
    count, temperature = 800, 0.7
    caches = model.new_caches(max_batch_size=count, max_seq_len=24, max_step_tokens=6, cache_format=PLAIN)
    ids, anchor = token_ids(6), 9
    places = torch.arange(6).repeat(count), torch.arange(count).repeat_interleave(6)
    model(ids.repeat(count), *places, caches)
    steps = DraftSteps(model, caches, verify)
    numbers = torch.tensor([[temperature, 0.0, 1.0, 0.0]] * count, dtype=torch.float64)
    steps.load(torch.full((count,), anchor), torch.full((count,), 6), numbers, torch.arange(count))
    first = steps.step()[:, 1].clone()
    second = steps.step().clone()

    def exact(tokens: list[int]) -> Tensor:
        one = model.new_caches(max_batch_size=1, max_seq_len=24, cache_format=PLAIN)
        row = torch.tensor([*ids.tolist(), *tokens])
        logits = model(row, torch.arange(len(row)), torch.zeros_like(row), one)[-1]
        return torch.softmax(logits.double() / temperature, 0)

    def check(drawn: Tensor, wanted: Tensor) -> None:
        expected, got = wanted * len(drawn), torch.bincount(drawn, minlength=64).double()
        common = expected >= 5
        pairs = [(got[common], expected[common]), (got[~common].sum()[None], expected[~common].sum()[None])]
        got, expected = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
        assert ((got - expected).square() / expected).sum() < 2.2 * len(got) + 12

    check(first, exact([anchor]))
    token = int(first.bincount().argmax())
    some = second[first == token]
    assert len(some) > 60 and 1 < some[:, 0].double().mean() < 6
    check(some[:, 1], exact([anchor, token]))


def test_samples_do_not_depend_on_the_batch(model: V41Model) -> None:
    prompts, options = [token_ids(19), token_ids(7).flip(0)], {"temperature": 1.0, "seed": 3, "top_k": 30}
    together = text(model, prompts, **options)
    assert together[:1] == text(model, prompts[:1], **options)
    assert together != text(model, prompts, **options | {"seed": 5})
    assert text(model, prompts, temperature=1.0, top_k=1) == text(model, prompts)


def test_logits_of_nan_end_a_call(model: V41Model) -> None:
    other = tiny_model(drafts=DRAFTS, **KINDS)
    other.head.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="E211"):
        text(other, [[1, 2, 3]])


def test_what_has_no_drafts_says_so(model: V41Model) -> None:
    without = tiny_model(**KINDS)
    caches = model.new_caches(max_batch_size=1, max_seq_len=32, drafts=False, cache_format=PLAIN)
    for code, message, call in (
        ("E208", "a model without drafts", lambda: text(without, [[1]], drafts=True)),
        ("E208", "caches without drafts", lambda: text(model, [[1]], drafts=True, caches=caches)),
        ("E208", "decode=", lambda: text(model, [[1]], drafts=True, decode=model)),
        ("E201", "drafts='on'", lambda: text(model, [[1]], drafts="on")),
    ):
        with pytest.raises(InputError, match=message) as caught:
            call()
        assert caught.value.code == code
    text(model, [[1]], caches=caches)
    assert model.draft_statistics is None
