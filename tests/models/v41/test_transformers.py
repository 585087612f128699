"""DeepSeek-V4.1 as a language model of transformers: `hf.load`, and `generate` as its users call it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.model.v41_causal_lm import V41ForCausalLM
from dsv4_compile.models.v41 import V41Format, V41Model, generate, prefill, save_folder
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_loading import tokenizer
from tests.models.v41.worked import token_ids

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "max_step_tokens": 11}
PLAIN = V41Format.plain()
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LENGTHS = (19, 7, 1)


@pytest.fixture(scope="module")
def core() -> V41Model:
    return tiny_model(**KINDS)


@pytest.fixture
def model(core: V41Model) -> Any:
    return of(core)


def of(core: V41Model) -> Any:
    """A language model without end tokens."""
    model = V41ForCausalLM(core, SIZES | {"cache_format": PLAIN})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts() -> list[Tensor]:
    ids = token_ids()
    return [ids[begin : begin + length] for begin, length in zip((0, 5, 3), LENGTHS, strict=True)]


def padded(side: str = "left") -> dict[str, Tensor]:
    """The prompts as a batch of a tokenizer."""
    ids, mask = torch.zeros(3, max(LENGTHS)).long(), torch.zeros(3, max(LENGTHS)).long()
    for row, prompt in enumerate(prompts()):
        at = slice(-len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, at], mask[row, at] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(core: V41Model, ids: Tensor, new: int = 8, stop: tuple[int, ...] = ()) -> list[int]:
    return generate(core, [ids], max_new_tokens=new, stop=[*stop], cache_format=PLAIN)[0]


class Counted(LogitsProcessor):
    """Changes nothing, and counts its calls."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Full(StoppingCriteria):
    """Stops all sequences at a length."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= max(LENGTHS) + 3)


def test_greedy_tokens_are_those_of_the_plain_model_in_both_loops(core: V41Model, model: Any) -> None:
    """Left padding changes nothing; a processor of the caller's runs in transformers' loop."""
    batch, first = padded(), max(LENGTHS)
    want = torch.tensor([alone(core, prompt) for prompt in prompts()])
    counted = Counted()
    for options in ({}, {"logits_processor": LogitsProcessorList([counted])}):
        got = model.generate(**batch, **GREEDY, **options)
        assert torch.equal(got[:, :first], batch["input_ids"]) and torch.equal(got[:, first:], want)
    assert counted.calls == 8
    ends = int(want[1, 2])
    for options in ({}, {"logits_processor": LogitsProcessorList([counted])}):
        got = model.generate(**batch, **GREEDY, **options, eos_token_id=ends)[:, first:]
        for row, prompt in enumerate(prompts()):
            tokens = alone(core, prompt, stop=(ends,))
            assert got[row].tolist() == tokens + [0] * (got.shape[1] - len(tokens))


def test_sampling_follows_the_seed_and_the_logits_of_eager_steps(core: V41Model, model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.8, "top_k": 20}
    record = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(model.generate(**padded(), **options, **record))
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    new = texts[0].sequences[:, max(LENGTHS) :]
    for row, prompt in enumerate(prompts()):
        for step in range(6):
            caches = core.new_caches(max_batch_size=1, max_seq_len=64, cache_format=PLAIN)
            logits = prefill(core, [torch.cat([prompt, new[row, :step]])], caches)
            torch.testing.assert_close(texts[0].logits[step][row], logits[0], rtol=0, atol=1e-4)
    assert len(texts[0].scores) == 6 and texts[0].scores[0].isinf().any()


def test_a_second_turn_continues_the_cache(core: V41Model, model: Any) -> None:
    """In both loops, and from what a forward returned; a cache of a later call is stale."""
    first, more = prompts()[0][None], prompts()[1][None]
    want = alone(core, torch.cat([first, torch.tensor([alone(core, first[0])]), more], dim=1)[0])
    for options in ({}, {"logits_processor": LogitsProcessorList([Counted()])}):
        cache = hf.new_cache(model)
        turn = model.generate(first, **GREEDY, **{CACHE_NAME: cache}, **options)
        assert cache.get_seq_length() == turn.shape[1] - 1
        turn = torch.cat([turn, more], dim=1)
        assert model.generate(turn, **GREEDY, **{CACHE_NAME: cache}, **options)[0, turn.shape[1] :].tolist() == want
    handle = model.generate(first, **GREEDY, return_dict_in_generate=True)[CACHE_NAME]
    again = model(torch.tensor([[1, 2]]))
    with pytest.raises(DSV4Error, match="stale"):
        model(more, **{CACHE_NAME: handle})
    assert model(more, **{CACHE_NAME: again[CACHE_NAME]}).logits.shape == (1, LENGTHS[1], 64)


def test_logits_of_all_columns_are_those_of_one_step(core: V41Model, model: Any) -> None:
    """Padding on either side, in the middle of a row too, has logits of 0."""
    gaps = padded()
    gaps["attention_mask"][0, 4:9] = 0
    for batch in (padded("left"), padded("right"), gaps):
        logits, keep = model(**batch).logits, batch["attention_mask"].bool()
        last = model(**batch, logits_to_keep=3).logits
        torch.testing.assert_close(last, logits[:, -3:], rtol=0, atol=1e-4)  # GEMMs of other sizes
        assert not logits[~keep].any() and not last[~keep[:, -3:]].any()
        for row in range(3):
            ids = batch["input_ids"][row][keep[row]]
            caches = core.new_caches(max_batch_size=1, max_seq_len=64, cache_format=PLAIN)
            with torch.no_grad():
                want = core(ids, torch.arange(len(ids)), torch.zeros_like(ids), caches)
            torch.testing.assert_close(logits[row][keep[row]], want, rtol=0, atol=1e-4)
    ids = prompts()[0][None]
    result = model(ids, labels=ids, use_cache=False, return_dict=False)
    want = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(result[0], want)
    assert len(result) == 2


def test_criteria_streamers_and_chunks(core: V41Model, model: Any, capsys: Any) -> None:
    words: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer()))
    ids = prompts()[0][None]
    want = alone(core, ids[0])
    for options in ({}, {"logits_processor": LogitsProcessorList([Counted()])}):
        model.generate(ids, **GREEDY, **options, streamer=TextStreamer(words, skip_prompt=True))
        assert capsys.readouterr().out.split() == words.decode(want).split()
    stopped = model.generate(ids, **GREEDY, stopping_criteria=StoppingCriteriaList([Full()]))
    assert stopped.shape[1] == max(LENGTHS) + 3
    assert model.generate(ids, **GREEDY, prefill_chunk_size=5)[0, ids.shape[1] :].tolist() == want
    assert model.generate(ids, **GREEDY, repetition_penalty=1.3).shape == (1, ids.shape[1] + 8)
    several = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert several.shape == (3, ids.shape[1] + 4)


BAD: dict[str, Callable[[Any], Any]] = {
    "beams": lambda m: m.generate(torch.ones(1, 3).long(), num_beams=2, max_new_tokens=2),
    "assistant": lambda m: m.generate(torch.ones(1, 3).long(), assistant_model=m, max_new_tokens=2),
    "prompt lookup": lambda m: m.generate(torch.ones(1, 3).long(), prompt_lookup_num_tokens=2, max_new_tokens=2),
    "no cache": lambda m: m.generate(torch.ones(1, 3).long(), use_cache=False, max_new_tokens=2),
    "static cache": lambda m: m.generate(torch.ones(1, 3).long(), cache_implementation="static", max_new_tokens=2),
    "drafts": lambda m: m.generate(torch.ones(1, 3).long(), drafts=True, max_new_tokens=2),
    "too many rows": lambda m: m.generate(torch.ones(4, 3).long(), max_new_tokens=2),
    "too long": lambda m: m.generate(torch.ones(1, 3).long(), max_new_tokens=64),
    "right padding": lambda m: m.generate(**padded("right"), max_new_tokens=2),
    "embeddings": lambda m: m(inputs_embeds=torch.zeros(1, 3, 64)),
    "attentions": lambda m: m(torch.ones(1, 3).long(), output_attentions=True),
    "hidden states": lambda m: m(torch.ones(1, 3).long(), output_hidden_states=True),
    "positions": lambda m: m(torch.ones(1, 3).long(), position_ids=torch.tensor([[1, 2, 3]])),
    "an image": lambda m: m(torch.tensor([[1, 64]])),
    "floating ids": lambda m: m(torch.ones(1, 3)),
    "training": lambda m: m.train()(torch.ones(1, 3).long()),
    "a cache of a different model": lambda m: m(
        torch.ones(1, 3).long(), cache=hf.new_cache(V41ForCausalLM(tiny_model(), SIZES))
    ),
    "resize": lambda m: m.resize_token_embeddings(70),
    "continuous batching": lambda m: m.generate_batch([[1, 2]]),
    "backward": lambda m: m(torch.ones(1, 3).long(), labels=torch.ones(1, 3).long()).loss.backward(),
    "to the hub": lambda m: m.save_pretrained("nowhere", push_to_hub=True),
    "convert": lambda m: hf.convert(m, max_batch_size=1, max_seq_len=8),
    "warm_up": hf.warm_up,
    "two graphs": lambda m: m.compile(fullgraph=False),
    "captures on a CPU": lambda m: (m.compile(backend="eager", options={"dsv4.cudagraph": "full"}), m(**padded())),
}


@pytest.mark.parametrize("name", BAD)
def test_calls_that_it_does_not_run_are_refused_with_a_code(name: str, model: Any) -> None:
    with pytest.raises(DSV4Error) as caught:
        BAD[name](model)
    assert caught.value.code in ("E201", "E204", "E206", "E208", "E303", "E420"), caught.value
    model.eval()
    assert model.generate(**padded(), **GREEDY).shape == (3, max(LENGTHS) + 8)


def test_a_compiled_model_replays_its_decode_steps(core: V41Model) -> None:
    """The captures of the model's own cache, in both loops; a further cache shares the compiled code."""
    model, batch = of(core), padded()
    want, first = model.generate(**batch, **GREEDY), prompts()[0][None]
    model.compile(backend="eager", options={"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"})
    with torch._dynamo.config.patch(specialize_float=True):  # as where Inductor has compiled them
        done = hf.warm_up(model)
    assert (done.graphs, done.captures, done.prompts, done.batches) == (3, 4, (33,), (2, 3))
    captured = model.dsv4_cache.steps.captured
    with torch.compiler.set_stance("fail_on_recompile"):
        for options in ({}, {"logits_processor": LogitsProcessorList([Counted()])}):
            before = captured.statistics.replays
            with torch.inference_mode():
                assert torch.equal(model.generate(**batch, **GREEDY, **options), want)
            assert captured.statistics.replays >= before + 7
        cache = hf.new_cache(model)
        turn = model.generate(first, **GREEDY, **{CACHE_NAME: cache})
        assert turn[0, first.shape[1] :].tolist() == alone(core, first[0])
    with pytest.raises(DSV4Error, match="E432"):
        copy.deepcopy(model)(first)


def test_a_folder_is_loaded_chats_and_is_saved(core: V41Model, tmp_path: Path) -> None:
    """A tokenizer, a chat template, a pipeline and a running batch of a loaded folder."""
    save_folder(core, tmp_path / "v41")
    words: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer()), pad_token="a", eos_token="b")
    words.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    words.save_pretrained(tmp_path / "v41")
    (tmp_path / "v41" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "do_sample": True}))
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "kv_cache_dtype": PLAIN, "device": "cpu"}
    options = sizes | {"dtype": torch.float32, "dequantize": True}
    model: Any = hf.load(tmp_path / "v41", **options)
    words = AutoTokenizer.from_pretrained(tmp_path / "v41")
    assert model.generation_config.do_sample and model.generation_config.eos_token_id == 1
    chat = [{"role": "user", "content": "a c d A e f"}]
    inputs = words.apply_chat_template(chat, return_tensors="pt", return_dict=True, add_generation_prompt=True)
    got = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :].tolist()
    assert got == generate(model.model, [inputs["input_ids"][0]], max_new_tokens=8, stop=[1], cache_format=PLAIN)[0]
    pipe: Any = pipeline("text-generation", model=model, tokenizer=words)
    assert pipe("a c d A e f", **GREEDY, return_full_text=False)[0]["generated_text"] == words.decode(got)
    batch = hf.RunningBatch(model, slots=2)
    request = batch.submit(inputs["input_ids"][0], max_new_tokens=8)
    batch.run()
    assert request.stop_tokens == {1} and request.tokens == got
    model.save_pretrained(tmp_path / "copy")
    words.save_pretrained(tmp_path / "copy")
    copied = hf.load(tmp_path / "copy", **options)
    assert copied.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :].tolist() == got
    for refused in ({"hadamard": True}, {"num_drafts": 1}, {"kv_cache_dtype": "fp8_ds_mla"}):
        with pytest.raises(DSV4Error, match=r"E20[18]"):
            hf.load(tmp_path / "v41", **options | refused)
