"""Tests of `generate` with drafts: the text, cache and callbacks of `generate` without."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dsv4_compile import hf
from dsv4_compile._compat import counters
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import quiet_libraries, tiny_model
from tests.hf.serving import damaged
from tests.hf.small import LAYERS, random_ids
from tests.support.draft_sources import Arbitrary, Biased, Forced, Source, Wrong

WHOLE = bool(os.environ.get("DSV4_LONG"))
"""Whether tests run thousands of steps in place of a sample."""
VOCAB = 512
MAX_SEQ_LEN = 512
Prompt = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    quiet_libraries()
    return hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=MAX_SEQ_LEN)


@pytest.fixture(autouse=True)
def without_drafts_after(model: Any) -> Iterator[None]:
    yield
    model.__dict__.pop("dsv4_drafts", None)
    model.__dict__.pop("_dsv4_told", None)


def padded(lengths: list[int], seed: int = 0) -> Prompt:
    """Return random prompts, padded on the left, and their mask."""
    width, generator = max(lengths), torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def plain(model: Any, prompt: Prompt, **options: Any) -> Any:
    """Generate greedily without drafts."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    return model.generate(prompt[0], attention_mask=prompt[1], drafts=False, **options)


def drafted(model: Any, source: Source, prompt: Prompt, **options: Any) -> Any:
    """Generate greedily with drafts of `source`; fail if that ran without."""
    model.__dict__["dsv4_drafts"] = source
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    result = model.generate(prompt[0], attention_mask=prompt[1], **options)
    assert model.draft_statistics is not None
    return result


def texts_of(prompt: Prompt, sequences: Tensor) -> Tensor:
    """Return the tokens of each row from its first one on, then zeros."""
    ids, mask = prompt
    texts = torch.zeros_like(sequences)
    for row, length in enumerate(mask.sum(1).tolist()):
        begin = ids.shape[1] - length
        texts[row, : sequences.shape[1] - begin] = sequences[row, begin:]
    return texts


def in_turn(lengths: Tensor) -> Tensor:
    """Return numbers of accepted drafts that change from step to step."""
    return lengths * 5 % 6


def right(prompt: Prompt, sequences: Tensor, accepted: Callable[[Tensor], Tensor] = in_turn) -> Forced:
    """Return drafts from the text that `generate` gave without them."""
    return Forced(texts_of(prompt, sequences), accepted)


def test_fault_7_random_batches_get_the_text_of_plain_decode(model: Any) -> None:
    """Right, sabotaged and arbitrary drafts, prompts of 1 to 300 tokens, chunks of odd sizes."""
    rng, steps, number = random.Random(3), 0, 0
    while steps < (2000 if WHOLE else 40):
        lengths = [rng.choice((1, 2, 5, rng.randint(3, 40), rng.randint(100, 300))) for _ in range(rng.randint(1, 4))]
        if not number:
            lengths = [1, 127, 30]
        number += 1
        prompt, tokens = padded(lengths, number), 40 if WHOLE else 14
        options: dict[str, Any] = {"max_new_tokens": tokens}
        want = plain(model, prompt, **options)
        kind = rng.randrange(3)
        sources = right(prompt, want), Wrong(texts_of(prompt, want)), Arbitrary()
        if number % 2:
            options["prefill_chunk_size"] = rng.choice((1, 3, 5, 7, 61, 129))
        got = drafted(model, sources[kind if WHOLE else number % 3], prompt, **options)
        assert torch.equal(got, want), f"{lengths}, {options}, {kind}"
        steps += model.draft_statistics.steps


def test_acceptance_is_reported_by_position(model: Any) -> None:
    prompt = padded([9])
    want = plain(model, prompt, max_new_tokens=25)
    got = drafted(model, right(prompt, want, lambda n: torch.full_like(n, 5)), prompt, max_new_tokens=25)
    assert torch.equal(got, want)
    assert model.draft_statistics.accepted == (0, 0, 0, 0, 0, 4) and model.draft_statistics.tokens_per_step == 6
    drafted(model, Wrong(texts_of(prompt, want)), prompt, max_new_tokens=5)
    assert model.draft_statistics.accepted == (4, 0, 0, 0, 0, 0)
    model.generate(prompt[0], max_new_tokens=2, drafts=False)
    assert model.draft_statistics is None


class Stream:
    """Streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.given.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.given.append([-1])


class Recorded(StoppingCriteria):
    """Criterion that keeps the last tokens it sees, and ends a row at some number of columns."""

    def __init__(self, columns: int) -> None:
        self.columns, self.seen = columns, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        ends = torch.zeros(len(input_ids), dtype=torch.bool)
        ends[0] = input_ids.shape[1] == self.columns
        return ends | (input_ids.shape[1] > self.columns + 3)


@pytest.mark.parametrize("lengths", [[20], [20, 7, 33]])
@pytest.mark.parametrize("new", [1, 2, 6, 17])
def test_fault_9_the_length_limit_lies_inside_a_block(model: Any, lengths: list[int], new: int) -> None:
    prompt = padded(lengths)
    want = plain(model, prompt, max_new_tokens=24)
    got = drafted(model, right(prompt, want), prompt, max_new_tokens=new)
    assert torch.equal(got, want[:, : got.shape[1]]) and got.shape[1] == prompt[0].shape[1] + new


@pytest.mark.parametrize("lengths", [[20], [20, 7, 33]])
def test_fault_9_the_stop_token_lies_inside_a_block(model: Any, lengths: list[int]) -> None:
    """Text, streamer, cache and a second turn are those of plain decode."""
    prompt = padded(lengths)
    longest = plain(model, prompt)
    stops = [int(longest[0, -5]), *([int(longest[1, -16])] if len(lengths) > 1 else [])]
    streams, results = [], []
    for source in (None, right(prompt, longest, lambda n: 2 + n % 4)):
        stream = Stream() if len(lengths) == 1 else None
        options = {"eos_token_id": stops, "pad_token_id": 3, "return_dict_in_generate": True, "streamer": stream}
        cache = hf.new_cache(model)
        first = {"past_key_values": cache, **options}
        result = plain(model, prompt, **first) if source is None else drafted(model, source, prompt, **first)
        lens, columns = cache.seq_lens.tolist(), (cache.get_seq_length(), cache.appended)
        new = torch.cat((result.sequences, random_ids(len(lengths), 5)), 1) if not results else results[0][-1]
        mask = torch.cat((prompt[1], torch.ones(len(lengths), new.shape[1] - prompt[1].shape[1], dtype=torch.long)), 1)
        second = {"max_new_tokens": 7, "past_key_values": cache}
        turn = (
            plain(model, (new, mask), **second)
            if source is None
            else drafted(model, Arbitrary(), (new, mask), **second)
        )
        streams.append(None if stream is None else stream.given)
        results.append((result.sequences.tolist(), lens, columns, turn.tolist(), new))
    assert streams[0] == streams[1]
    assert results[0][:4] == results[1][:4]


def test_fault_9_criteria_of_the_caller_see_every_column(model: Any) -> None:
    """Without stop tokens, a row that a criterion has ended goes on until all have ended, as in transformers."""
    prompt = padded([12, 20])
    longest = plain(model, prompt)
    criteria = [Recorded(26), Recorded(26)]
    want = plain(model, prompt, stopping_criteria=StoppingCriteriaList([criteria[0]]))
    got = drafted(model, right(prompt, longest), prompt, stopping_criteria=StoppingCriteriaList([criteria[1]]))
    assert torch.equal(got, want) and got.shape[1] < longest.shape[1]
    assert criteria[0].seen == criteria[1].seen


PLAIN: dict[str, dict[str, Any]] = {
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.3},
    "MinPLogitsWarper": {"do_sample": True, "min_p": 0.1},
    "of function only": {"logits_processor": LogitsProcessorList([lambda ids, scores: -scores])},
    "output_scores=True": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits=True": {"return_dict_in_generate": True, "output_logits": True},
    "output_hidden_states=True": {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("reason", PLAIN)
def test_fault_9_a_call_that_needs_the_host_at_each_step_runs_without_drafts(
    reason: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, options = padded([12, 5]), {"max_new_tokens": 6, **PLAIN[reason]}
    torch.manual_seed(1)
    want = plain(model, prompt, **options)
    model.__dict__["dsv4_drafts"] = Arbitrary()
    with caplog.at_level("WARNING", "dsv4_compile.hf"):
        for _ in range(2):
            torch.manual_seed(1)
            got = model.generate(prompt[0], attention_mask=prompt[1], **{"do_sample": False, **options})
    assert model.draft_statistics is None
    assert [record.message.count(reason) for record in caplog.records if "without drafts" in record.message] == [1]
    assert torch.equal(*(r if isinstance(r, Tensor) else r.sequences for r in (got, want)))


def test_hooks_of_the_caller_run(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.__dict__["dsv4_drafts"] = Arbitrary()
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *args: calls.append(1))
    try:
        model.generate(padded([4])[0], max_new_tokens=3)
    finally:
        hook.remove()
    assert len(calls) == 3 and "forward hooks" in caplog.text


def test_drafts_are_switched_off_and_asked_for(model: Any) -> None:
    ids = padded([4])[0]
    with pytest.raises(DSV4Error, match="drafts=True for a model without drafts"):
        model.generate(ids, max_new_tokens=3, drafts=True)
    model.__dict__["dsv4_drafts"] = Arbitrary()
    with pytest.raises(DSV4Error, match="drafts='no'"):
        model.generate(ids, max_new_tokens=3, drafts="no")
    config = GenerationConfig(max_new_tokens=3)
    for options, runs in (({}, True), ({"drafts": True}, True), ({"drafts": False}, False)):
        model.generate(ids, generation_config=config, **options)
        assert (model.draft_statistics is not None) == runs
    config.drafts = False
    model.generate(ids, generation_config=config)
    assert model.draft_statistics is None
    model.generate(ids, generation_config=config, drafts=True)
    assert model.draft_statistics is not None


def test_tokens_of_calls_without_drafts_keep_them_off_until_the_window_has_passed(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = padded([60])
    want = plain(model, prompt)
    model.__dict__["dsv4_drafts"] = right(prompt, want)
    for first, runs in ((50, False), (10, True)):
        cache = hf.new_cache(model)
        model(prompt[0][:, :first], past_key_values=cache)
        got = model.generate(prompt[0], past_key_values=cache, max_new_tokens=24, do_sample=False)
        assert torch.equal(got, want) and (model.draft_statistics is not None) == runs
    assert "the cache has tokens of calls without drafts" in caplog.text


@pytest.mark.parametrize("tokens", [250, 255, 256])
def test_the_end_of_the_cache_lies_inside_a_block(model: Any, tokens: int) -> None:
    prompt = padded([240, 238])
    options = {"max_new_tokens": tokens + 1 - 240}
    want = plain(model, prompt, **options)
    cache = hf.new_cache(model, max_batch_size=2, max_seq_len=256)
    got = drafted(model, right(prompt, want), prompt, past_key_values=cache, **options)
    assert torch.equal(got, want) and cache.seq_lens.tolist() == [tokens, tokens - 2]


def test_a_cache_of_short_steps_runs_without_drafts(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.__dict__["dsv4_drafts"] = Arbitrary()
    cache = hf.new_cache(model, max_step_tokens=5)
    model.generate(padded([4])[0], past_key_values=cache, max_new_tokens=3)
    assert "takes 5 tokens in a step, and drafts need 6" in caplog.text


@pytest.mark.parametrize("source", [Arbitrary(), Biased()], ids=["one-hot", "with logits"])
def test_sampled_text_follows_torch_seed_and_the_options(source: Source, model: Any) -> None:
    prompt = padded([12, 5])

    def sample(seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        return drafted(model, source, prompt, do_sample=True, max_new_tokens=12, **options)

    first = sample(1, temperature=0.8, top_k=0)
    assert torch.equal(first, sample(1, temperature=0.8, top_k=0))
    assert not torch.equal(first, sample(2, temperature=0.8, top_k=0))
    want = plain(model, prompt, max_new_tokens=12)
    assert torch.equal(sample(1, top_k=1), want)
    assert torch.equal(sample(1, top_p=1e-6), want)
    few = sample(3, top_k=3, temperature=5.0)
    mask = torch.cat((prompt[1], torch.ones(2, 12, dtype=torch.long)), 1)
    logits = model(few, attention_mask=mask).logits[:, -13:-1]
    ranks = (logits > logits.gather(2, few[:, -12:, None])).sum(-1)
    assert int(ranks.max()) <= 2 and len(ranks.unique()) > 1


def test_logits_of_nan_raise() -> None:
    model = damaged()
    model.__dict__["dsv4_drafts"] = Arbitrary()
    with pytest.raises(DSV4Error, match="E211"):
        model.generate(torch.tensor([[5, 510, 7]]), max_new_tokens=4, do_sample=False)


def test_a_copied_cache_goes_on_alone(model: Any) -> None:
    prompt = padded([20])
    want = plain(model, prompt, max_new_tokens=20)
    cache = hf.new_cache(model, max_batch_size=1)
    first = drafted(model, right(prompt, want), prompt, past_key_values=cache, max_new_tokens=9)
    for branch in (copy.deepcopy(cache), cache):
        ids = torch.cat((first, torch.tensor([[7]])), 1)
        turn = drafted(model, Arbitrary(), (ids, torch.ones_like(ids)), past_key_values=branch, max_new_tokens=5)
        assert torch.equal(turn, plain(model, (ids, torch.ones_like(ids)), max_new_tokens=5))


def test_fault_10_one_graph_serves_steps_with_any_acceptance() -> None:
    """No graph break and no recompile over 300 steps; Dynamo traces, and nothing is generated."""
    model = hf.convert(
        tiny_model(num_hidden_layers=1, layer_types=["sliding_attention"]), max_batch_size=2, max_seq_len=1024
    )
    prompt = padded([9, 4])
    want = plain(model, prompt, max_new_tokens=120)
    counters.clear()
    model.compile(fullgraph=True, backend="eager")
    patterns = torch.randint(0, 6, (3, 997))
    steps, graphs = 0, []
    table = torch.zeros(997, dtype=torch.int64)
    source = right(prompt, want, lambda n: table[n])
    while steps < 300:
        table.copy_(patterns[len(graphs) % 3])
        got = drafted(model, source, prompt, max_new_tokens=120)
        assert torch.equal(got, want)
        graphs.append(counters["stats"]["unique_graphs"])
        steps += model.draft_statistics.steps
    assert graphs == [2] * len(graphs) and not counters["graph_break"]
