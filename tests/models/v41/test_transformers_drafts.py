"""transformers' `generate` of DeepSeek-V4.1 with drafts: the text, the cache and the streams are those without."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.model.v41_causal_lm import V41ForCausalLM
from dsv4_compile.models.v41 import V41Model, draft_steps, generate, save_folder
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_draft_generate import DRAFTS
from tests.models.v41.test_loading import tokenizer
from tests.models.v41.test_running_drafts import known
from tests.models.v41.test_transformers import GREEDY, LENGTHS, PLAIN, SIZES, Counted, Full, padded, prompts

FIRST = max(LENGTHS)
LONG: dict[str, Any] = {"max_new_tokens": 13, "do_sample": False}
SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}


@pytest.fixture(scope="module")
def core() -> V41Model:
    """A layer of each kind, and two draft layers."""
    return tiny_model(drafts=DRAFTS, **KINDS)


@pytest.fixture(scope="module")
def texts(core: V41Model) -> list[list[int]]:
    """Greedy text of each prompt without drafts."""
    return generate(core, prompts(), max_new_tokens=13, stop=[], drafts=False, cache_format=PLAIN)


@pytest.fixture
def model(core: V41Model, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A language model without end tokens, and drafts that are right for any number of tokens."""
    propose = known([(ids.tolist(), text) for ids, text in zip(prompts(), texts, strict=True)])
    monkeypatch.setattr(draft_steps, "propose", propose)
    return of(core)


def of(core: V41Model) -> Any:
    model = V41ForCausalLM(core, SIZES | {"cache_format": PLAIN})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Stream:
    """A streamer that notes columns, and raises at one of them."""

    def __init__(self, last: float = math.inf) -> None:
        self.columns: list[list[int]] = []
        self.last, self.ended = last, False

    def put(self, value: Tensor) -> None:
        self.columns.append(value.flatten().tolist())
        if len(self.columns) > self.last:
            raise KeyError(self.last)

    def end(self) -> None:
        self.ended = True


def test_greedy_columns_are_those_without_drafts(model: Any, texts: list[list[int]]) -> None:
    """Left padding, end tokens inside a block, criteria, streams, chunks, and rows that fill the cache."""
    batch, want = padded(), torch.tensor(texts)
    got = model.generate(**batch, max_new_tokens=13, do_sample=False, prefill_chunk_size=4)
    assert torch.equal(got[:, FIRST:], want) and torch.equal(got[:, :FIRST], batch["input_ids"])
    assert model.draft_statistics.tokens_per_step > 2
    stream = Stream()
    ends = texts[1][3]
    got = model.generate(**batch, **GREEDY, eos_token_id=ends, streamer=stream)[:, FIRST:].tolist()
    for row, text in zip(got, texts, strict=True):
        end = text.index(ends) + 1 if ends in text[:8] else 8
        assert row == text[:end] + [0] * (len(row) - end)
    assert stream.ended and stream.columns[1:] == [list(column) for column in zip(*got, strict=True)]
    stopped = model.generate(**batch, **GREEDY, stopping_criteria=StoppingCriteriaList([Full()]))
    assert torch.equal(stopped[:, FIRST:], want[:, :3])
    cache = hf.new_cache(model, max_seq_len=FIRST + 13)
    full = model.generate(prompts()[0][None], max_length=FIRST + 13, do_sample=False, **{CACHE_NAME: cache})
    assert full[0, FIRST:].tolist() == texts[0]
    with torch.inference_mode():
        record = model.generate(**batch, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(record.sequences[:, FIRST:], want[:, :8])


@pytest.mark.parametrize("ends", [False, True])
def test_a_cache_goes_on_where_the_text_ends(
    model: Any, texts: list[list[int]], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After end tokens and a streamer that raises, while a row accepts all drafts and the others none."""
    monkeypatch.setattr(draft_steps, "propose", known([(prompts()[0].tolist(), texts[0])], correct=True))
    more = torch.tensor([[5, 9], [7, 2], [1, 8]])
    stop = {"eos_token_id": texts[0][2]} if ends else {}

    def turns(drafts: bool, last: float, columns: int) -> list[list[int]]:
        cache, batch = hf.new_cache(model), padded()
        stream, options = Stream(last), {**LONG, **stop, CACHE_NAME: cache, "drafts": drafts}
        try:
            ids = model.generate(**batch, **options, streamer=stream)
        except KeyError:
            ids = torch.cat([batch["input_ids"], torch.tensor(stream.columns[1:]).t()], dim=1)
        assert ids.shape[1] == columns or ends
        assert cache.get_seq_length() == ids.shape[1] - 1
        ids = torch.cat([ids, more], dim=1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, ids.shape[1] - FIRST), value=1)
        return model.generate(ids, attention_mask=mask, **SHORT, **{CACHE_NAME: cache, "drafts": drafts}).tolist()

    assert turns(True, math.inf, FIRST + 13) == turns(False, math.inf, FIRST + 13)
    if not ends:
        want = turns(True, 5, FIRST + 5)
        cache, batch = hf.new_cache(model), padded()
        ids = torch.cat([batch["input_ids"], torch.tensor(texts)[:, :5], more], dim=1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, ids.shape[1] - FIRST), value=1)
        again = model.generate(ids, attention_mask=mask, **SHORT, **{CACHE_NAME: cache, "drafts": False})
        assert again.tolist() == want


def test_sampled_rows_follow_their_seeds(core: V41Model) -> None:
    """By the model's own drafts: the tokens of `models.v41.generate` with the seeds that torch draws."""
    model = of(core)
    torch.manual_seed(3)
    got = model.generate(**padded(), **SAMPLED)[:, FIRST:].tolist()
    assert model.draft_statistics.steps > 0
    torch.manual_seed(3)
    assert model.generate(**padded(), **SAMPLED)[:, FIRST:].tolist() == got
    torch.manual_seed(3)
    seeds = torch.randint(0, 2**63 - 1, (3,)).tolist()
    sampling: dict[str, Any] = {name: SAMPLED[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    for row, seed, ids in zip(got, seeds, prompts(), strict=True):
        caches = core.new_caches(max_batch_size=1, max_seq_len=SIZES["max_seq_len"], cache_format=PLAIN)
        assert row == generate(core, [ids], **sampling, seed=seed, stop=[], caches=caches)[0]
    several = model.generate(prompts()[0][None], **SAMPLED | {"max_new_tokens": 3}, num_return_sequences=3)
    assert several.shape == (3, FIRST + 3) and len({*map(tuple, several.tolist())}) == 3


def test_calls_run_without_drafts_if_asked_or_if_the_host_is_needed(
    model: Any, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    batch, want, tokens = padded(), torch.tensor(texts)[:, :4], SHORT
    without = copy.copy(model.generation_config)
    without.drafts = False
    hook = model.model.layers[1].register_forward_hook(lambda *args: None)
    with caplog.at_level(logging.WARNING, logger="dsv4_compile.hf"):
        assert torch.equal(model.generate(**batch, **tokens)[:, FIRST:], want)
        hook.remove()
        for options in (
            {"drafts": False},
            {"generation_config": without},
            {"logits_processor": LogitsProcessorList([Counted()])},
            {"logits_processor": LogitsProcessorList([Counted()])},
            {"return_dict_in_generate": True, "output_logits": True},
            {CACHE_NAME: hf.new_cache(model, max_step_tokens=4)},
            {CACHE_NAME: model.new_cache(drafts=False)},
        ):
            got = model.generate(**batch, **tokens, **options)
            got = got if isinstance(got, Tensor) else got.sequences
            assert torch.equal(got[:, FIRST:], want) and model.draft_statistics is None, options
    told = [record.message for record in caplog.records if "without drafts" in record.message]
    assert len(told) == 5, told
    for text, part in zip(
        told, ("hooks", "Counted", "output_logits", "takes 4 tokens in a step", "no windows"), strict=True
    ):
        assert part in text
    assert torch.equal(model.generate(**batch, **tokens, generation_config=without, drafts=True)[:, FIRST:], want)
    assert model.draft_statistics is not None
    with pytest.raises(DSV4Error, match="drafts='yes'"):
        model.generate(**batch, **tokens, drafts="yes")
    with pytest.raises(DSV4Error, match="without drafts"):
        of(tiny_model(**KINDS)).generate(**batch, **tokens, drafts=True)


def test_a_loaded_folder_generates_with_its_drafts(core: V41Model, tmp_path: Path) -> None:
    save_folder(core, tmp_path, tokenizer=tokenizer())
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 32, "kv_cache_dtype": PLAIN, "device": "cpu"}
    options = sizes | {"dtype": torch.float32, "dequantize": True}
    ids, ends = prompts()[0][None], {"eos_token_id": None}
    for drafts in ("auto", "off"):
        model = hf.load(tmp_path, **options, drafts=drafts)
        got = model.generate(ids, **SHORT, **ends)[0, FIRST:].tolist()
        assert (model.draft_statistics is not None) == (drafts == "auto") == (model.dsv4_drafts is not None)
        assert got == generate(model.model, [ids[0]], max_new_tokens=4, stop=[], drafts=False, cache_format=PLAIN)[0]


def test_captured_steps_and_logits_of_nan(model: Any, texts: list[list[int]]) -> None:
    model.compile(backend=None, options={"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"})
    hf.warm_up(model)
    captured = model.dsv4_cache.steps.captured_drafts
    for row in (slice(None), slice(0, 1)):
        batch = {name: tensor[row] for name, tensor in padded().items()}
        got = model.generate(**batch, **GREEDY)[:, FIRST:]
        assert torch.equal(got, torch.tensor(texts)[row, :8])
    assert captured.statistics.replays >= 4 and model.draft_statistics.steps == captured.draft_statistics().steps
    nan = of(tiny_model(drafts=DRAFTS, **KINDS))
    nan.model.head.weight.fill_(math.nan)
    with pytest.raises(DSV4Error, match="E211"):
        nan.generate(**padded(), **GREEDY)
