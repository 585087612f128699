"""Tests of unusual calls: each returns the numbers of eager transformers, or raises an error with a code."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from transformers import LogitsProcessorList

from dsv4_compile import hf
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from tests.hf.small import LAYERS, close, eager_logits, random_ids

MAX_SEQ_LEN = 256


def converted_model(**options: Any) -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=MAX_SEQ_LEN, **options)


@pytest.fixture(scope="module")
def converted() -> Any:
    return converted_model()


def compiled(model: Any) -> Any:
    model.compile(fullgraph=True, backend="dsv4", options={"fallback_by_default": True})
    return model


class TestCaches:
    """A cache belongs to one conversation of one batch, and to one call at a time."""

    def test_the_cache_of_an_older_call_is_refused(self, original: Any, converted: Any) -> None:
        ids = random_ids(1, 9)
        first = converted(ids)[CACHE_NAME]
        continued = converted(ids[:, :1], past_key_values=first)
        close(continued.logits, eager_logits(original, torch.cat((ids, ids[:, :1]), 1))[:, -1:])
        converted(random_ids(1, 5))
        for use in (lambda: converted(ids[:, :1], past_key_values=first), first.get_seq_length):
            with pytest.raises(ValueError, match=r"E208[\s\S]*stale"):
                use()

    def test_the_models_own_cache_is_not_for_callers(self, converted: Any) -> None:
        with pytest.raises(ValueError, match="E208"):
            converted(random_ids(1, 3), past_key_values=converted.model.dsv4_cache)

    def test_a_forward_inside_generate_has_a_cache_of_its_own(self, original: Any, converted: Any) -> None:
        """Logits processors probe the model; guidance runs a second sequence through it at each step."""
        ids = random_ids(1, 12)

        def probe(model: Any) -> LogitsProcessorList:
            def process(seen: Tensor, scores: Tensor) -> Tensor:
                other = model(seen[:, :4].flip(1)).logits[:, -1]
                return scores + other.float() * 0.1

            return LogitsProcessorList([process])

        got = converted.generate(ids, logits_processor=probe(converted), max_new_tokens=6, do_sample=False)
        want = original.generate(ids, logits_processor=probe(original), max_new_tokens=6, do_sample=False)
        assert torch.equal(got, want)
        options = {"guidance_scale": 1.5, "negative_prompt_ids": random_ids(1, 5), "max_new_tokens": 6}
        got, want = (model.generate(ids, do_sample=False, **options) for model in (converted, original))
        assert torch.equal(got, want)

    def test_caches_of_forwards_inside_generate_live_as_long_as_their_results(self, converted: Any) -> None:
        probed: list[weakref.ref[Any]] = []

        def probe(seen: Tensor, scores: Tensor) -> Tensor:
            probed.append(weakref.ref(converted(seen[:, :4])[CACHE_NAME].cache))
            return scores

        def alive() -> int:
            gc.collect()
            return sum(cache() is not None for cache in probed)

        counts: list[int] = []
        processors = LogitsProcessorList([probe, lambda seen, scores: (counts.append(alive()), scores)[1]])
        converted.generate(random_ids(1, 5), logits_processor=processors, max_new_tokens=4, do_sample=False)
        assert len(probed) == 4 and max(counts) <= 1

    def test_another_batch_size_on_a_used_cache(self, original: Any, converted: Any) -> None:
        cache, ids = hf.new_cache(converted), random_ids(1, 8)
        converted(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"E208[\s\S]*2 rows"):
            converted(random_ids(2, 1), past_key_values=cache)
        turn = torch.cat((ids, random_ids(1, 2)), 1)
        with pytest.raises(ValueError, match="E208"):
            converted.generate(turn, past_key_values=cache, num_return_sequences=2, do_sample=True, max_new_tokens=2)
        cache.reset()
        ids = random_ids(2, 8)
        close(converted(ids, past_key_values=cache).logits, eager_logits(original, ids))

    def test_the_cache_of_another_model(self, converted: Any) -> None:
        other = hf.convert(tiny_model(), max_batch_size=1, max_seq_len=MAX_SEQ_LEN)
        with pytest.raises(ValueError, match=r"E208[\s\S]*another configuration"):
            converted(random_ids(1, 3), past_key_values=hf.new_cache(other))
        rounded = converted_model(kv_cache_dtype="bfloat16")
        with pytest.raises(ValueError, match=r"E208[\s\S]*another cache format"):
            converted(random_ids(1, 3), past_key_values=hf.new_cache(rounded))
        copied = copy.deepcopy(converted)
        copied(random_ids(1, 3), past_key_values=hf.new_cache(converted))

    def test_a_failed_forward_leaves_a_cache_that_must_be_reset(self, converted: Any, monkeypatch: Any) -> None:
        cache, ids = hf.new_cache(converted), random_ids(1, 8)
        with monkeypatch.context() as patch:
            patch.setattr(converted.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                converted(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"E208[\s\S]*last forward failed"):
            converted(ids, past_key_values=cache)
        cache.reset()
        want = converted(ids).logits
        assert torch.equal(converted(ids, past_key_values=cache).logits, want)

    def test_a_sequence_over_its_capacity_is_refused_before_the_device_sees_it(self, converted: Any) -> None:
        cache = hf.new_cache(converted, max_seq_len=128)
        free = cache.paged.max_seq_len - 40
        mask = torch.ones(1, 100, dtype=torch.long)
        mask[:, :60] = 0
        converted(random_ids(1, 100), attention_mask=mask, past_key_values=cache)  # 40 tokens
        for piece in random_ids(1, free).split(cache.paged.max_step_tokens, dim=1):
            converted(piece, past_key_values=cache)
        with pytest.raises(ValueError, match="E204"):
            converted(random_ids(1, 1), past_key_values=cache)
        assert cache.seq_lens[0] == 40 + free

    def test_use_cache_false_returns_none(self, converted: Any) -> None:
        assert converted(random_ids(1, 3), use_cache=False).get(CACHE_NAME) is None
        assert len(converted(random_ids(1, 3), use_cache=False, return_dict=False)) == 1
        logits, cache = converted(random_ids(1, 3), return_dict=False)
        assert logits.shape == (1, 3, 512) and cache.get_seq_length() == 3


@pytest.mark.parametrize(
    "options",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        {"attention_mask": torch.zeros(1, 6)},
        {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)},
        {"attention_mask": torch.ones(1, 5, dtype=torch.long)},
        {"attention_mask": torch.ones(1, 7, dtype=torch.long)},
        {"attention_mask": torch.ones(2, 6, dtype=torch.long)},
        {"attention_mask": {"sliding_attention": torch.ones(1, 6)}},
        {"input_ids": torch.zeros(1, 0, dtype=torch.long)},
        {"input_ids": torch.zeros(6, dtype=torch.long)},
        {"input_ids": torch.zeros(1, 6)},
        {"output_attentions": True},
    ],
    ids=lambda options: "-".join(f"{k}-{getattr(v, 'shape', v)}" for k, v in options.items()),
)
def test_arguments_that_a_converted_model_cannot_honour(converted: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="E208"):
        converted(**{"input_ids": random_ids(1, 6), **options})


@torch.no_grad()
def test_arguments_by_place_and_by_name_are_those_of_the_forward(original: Any, converted: Any) -> None:
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    want = converted(input_ids=ids, attention_mask=mask).logits
    for got in (converted(ids, mask), converted(ids, mask, None), converted(ids, attention_mask=mask)):
        assert torch.equal(got.logits, want)
    for model in (original, converted):
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            model(ids, input_ids=ids)
        with pytest.raises(TypeError, match="positional"):
            model(*[None] * 40)
    assert torch.equal(converted(ids).logits, want)


def test_arguments_that_say_what_follows_anyway(original: Any, converted: Any) -> None:
    ids, cache = random_ids(2, 6), hf.new_cache(converted)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as transformers numbers padding
    got = converted(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    close(got[1], eager_logits(original, ids[1:])[0])
    close(got[0, 2:], eager_logits(original, ids[:1, 2:])[0])
    new = random_ids(2, 1)
    whole = torch.cat((mask, torch.ones_like(new)), 1)
    got = converted(new, attention_mask=whole.bool(), position_ids=torch.tensor([[4], [6]]), past_key_values=cache)
    close(got.logits[1], eager_logits(original, torch.cat((ids, new), 1)[1:])[0, -1:])
    whole[1, 0] = 0
    with pytest.raises(ValueError, match=r"E208[\s\S]*past columns"):
        converted(new, attention_mask=torch.cat((whole, torch.ones_like(new)), 1), past_key_values=cache)


def test_columns_count_padding_and_a_whole_mask_ends_with_the_new_columns(original: Any, converted: Any) -> None:
    ids, new, cache = random_ids(2, 6), random_ids(2, 1), hf.new_cache(converted)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    converted(ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 6 and cache.seq_lens[:2].tolist() == [4, 3]
    whole = torch.cat((mask, torch.ones_like(new)), 1)
    with pytest.raises(ValueError, match=r"E208[\s\S]*position_ids"):
        converted(new, attention_mask=whole, position_ids=torch.tensor([[9], [3]]), past_key_values=cache)
    got = converted(new, attention_mask=whole, past_key_values=cache).logits
    for row, start in enumerate((2, 3)):
        close(got[row], eager_logits(original, torch.cat((ids, new), 1)[row : row + 1, start:])[0, -1:])
    assert cache.get_seq_length() == 7 and cache.seq_lens[:2].tolist() == [5, 4]


def test_backward_raises(converted: Any) -> None:
    ids = random_ids(1, 5)
    for result in (converted(ids, labels=ids).loss, converted(ids).logits.sum(), converted.model(ids)[0].sum()):
        with pytest.raises(ValueError, match="E206"):
            result.backward()
    with torch.inference_mode():
        assert converted(ids, labels=ids).loss.isfinite()


def test_autocast_is_named(converted: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"E208[\s\S]*autocast"):
        converted(random_ids(1, 5))


class TestWeights:
    """Weights that are replaced are used; what would have no effect is refused and named."""

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "compiled"])
    def test_replaced_weights_take_effect(self, in_graph: bool) -> None:
        model, other = converted_model(), tiny_model(**LAYERS)
        plain = copy.deepcopy(other)
        if in_graph:
            compiled(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.25)
        ids = random_ids(1, 20)
        close(model(ids).logits, eager_logits(plain, ids))
        model.load_state_dict(other.state_dict(), assign=True)
        close(model(ids).logits, eager_logits(other, ids))
        attention, theirs = model.model.layers[0].self_attn, plain.model.layers[0].self_attn
        attention.q_a_proj.weight = nn.Parameter(theirs.q_a_proj.weight.clone())
        attention.kv_proj.weight.data = theirs.kv_proj.weight.data.clone()
        other.model.layers[0].self_attn.load_state_dict(
            {**other.model.layers[0].self_attn.state_dict(), **{k: theirs.state_dict()[k] for k in
             ("q_a_proj.weight", "kv_proj.weight")}}
        )  # fmt: skip
        close(model(ids).logits, eager_logits(other, ids))

    def test_a_wrapper_of_torch_compile_sees_them_too(self) -> None:
        model, other = converted_model(), tiny_model(**LAYERS)
        wrapper = torch.compile(model, fullgraph=True, backend="dsv4", options={"fallback_by_default": True})
        ids = random_ids(1, 20)
        close(wrapper(ids).logits, eager_logits(other, ids))
        weight = other.model.layers[1].self_attn.q_b_proj.weight.detach().roll(1, 0)
        other.model.layers[1].self_attn.q_b_proj.weight = nn.Parameter(weight)
        model.model.layers[1].self_attn.q_b_proj.weight = nn.Parameter(weight.clone())
        close(wrapper(ids).logits, eager_logits(other, ids))
        with pytest.raises(ValueError, match="E208"):
            wrapper(ids, attention_mask=torch.zeros(1, 20))

    def test_a_traced_forward_without_its_call_is_refused(self, converted: Any) -> None:
        with pytest.raises(ValueError, match="E208"):
            torch.compile(converted.forward, backend="eager")(random_ids(1, 4))
        torch.compiler.reset()  # else Dynamo runs the forward that it could not trace
        with pytest.raises(Unsupported, match="E208"):
            torch.compile(converted.forward, backend="eager", fullgraph=True)(random_ids(1, 4))

    @pytest.mark.parametrize("part", ["model", "stack"])
    def test_a_function_around_it_says_why_it_is_no_whole_graph(self, part: str, converted: Any) -> None:
        called = converted if part == "model" else converted.model

        def call(ids: Any) -> Any:
            return called(ids)[0]

        ids = random_ids(1, 4)
        with pytest.raises(Unsupported, match=r"checked on the host.*or the function around it without fullgraph"):
            torch.compile(call, backend="eager", fullgraph=True)(ids)
        torch.compiler.reset()
        if part == "model":
            close(torch.compile(call, backend="eager")(ids), call(ids))

    @pytest.mark.parametrize("change", ["hook", "pre-hook", "forward", "adapter", "parametrisation", "removed"])
    def test_what_would_have_no_effect_is_refused(self, change: str) -> None:
        model = converted_model()
        attention = model.model.layers[1].self_attn
        projection = attention.q_b_proj
        if change == "hook":
            projection.register_forward_hook(lambda *args: None)
        elif change == "pre-hook":
            projection.register_forward_pre_hook(lambda *args: None)
        elif change == "forward":
            projection.forward = lambda x: x
        elif change == "adapter":
            peft.inject_adapter_in_model(peft.LoraConfig(target_modules=r".*1.self_attn.q_b_proj"), model)
            model.eval()
        elif change == "parametrisation":
            nn.utils.parametrize.register_parametrization(projection, "weight", nn.Identity())
        else:
            projection.weight = None
        with pytest.raises(ValueError, match=r"E208[\s\S]*q_b_proj.* of layer 1"):
            model(random_ids(1, 4))

    def test_weights_that_do_not_fit_are_refused(self) -> None:
        model = converted_model()
        model.model.layers[0].self_attn.kv_proj.weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(ValueError, match=r"E207[\s\S]*kv_proj.weight of layer 0"):
            model(random_ids(1, 4))

    def test_a_deep_copy_and_a_saved_copy_have_weights_of_their_own(self, tmp_path: Any) -> None:
        converted, ids = converted_model(), random_ids(1, 20)
        want = converted(ids).logits
        copied = copy.deepcopy(converted)
        torch.save(converted, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        with torch.no_grad():
            copied.model.layers[0].self_attn.q_a_proj.weight.neg_()
        assert torch.equal(converted(ids).logits, want)
        assert torch.equal(loaded(ids).logits, want)
        assert not torch.equal(copied(ids).logits, want)


def test_convert_under_inference_mode_is_refused() -> None:
    model = tiny_model(**LAYERS)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"E208[\s\S]*inference_mode"):
        hf.convert(model, max_batch_size=1, max_seq_len=MAX_SEQ_LEN)


def test_saved_and_reverted_models_are_plain(original: Any, tmp_path: Any) -> None:
    model = compiled(converted_model())
    ids = random_ids(1, 20)
    model(ids)
    model.save_pretrained(tmp_path)
    assert '"DeepseekV4ForCausalLM"' in (tmp_path / "config.json").read_text()
    hf.revert(model)
    for length in range(2, 14):  # more graphs than a recompile limit allows
        ids = random_ids(1, length)
        close(eager_logits(model, ids), eager_logits(original, ids))


def test_an_attention_factor_that_transformers_would_compute_is_refused() -> None:
    config = tiny_config()
    config.rope_parameters["compress"]["attention_factor"] = None
    with pytest.raises(ValueError, match=r"E205[\s\S]*attention_factor=None"):
        hf.convert(type(tiny_model())(config).eval(), max_batch_size=1, max_seq_len=MAX_SEQ_LEN)
